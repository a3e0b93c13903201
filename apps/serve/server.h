// The server's paths, its access rules, and the way in which answers get to their clients.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "apps/serve/flags.h"
#include "apps/serve/http.h"
#include "apps/serve/scheduler.h"

namespace app::serve {

// A thread that parses requests, so that a request for /health does not wait while a long text is parsed.
class Worker {
 public:
  Worker();
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  void post(std::function<void()> work);
  void stop();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stopping_ = false;
  std::thread thread_;
};

class Server {
 public:
  // `settings` and `model` must outlive the server.
  Server(const Settings& settings, ServeFlags flags, const Model& model);

  // The limits and handlers for the HTTP server.
  HttpLimits limits() const;
  std::optional<Response> admit(const Request& head);
  std::string headers(const Request& head) const;
  void handle(Request request, std::shared_ptr<Exchange> exchange);
  std::string error_body(const std::string& path, int status, const std::string& message) const;
  void stop();

  const Scheduler& scheduler() const { return scheduler_; }
  Room& room() { return room_; }

 private:
  struct Api;
  struct Route;
  static const Route* find_route(const std::string& path);

  void dispatch(Request request, const std::shared_ptr<Exchange>& exchange);
  void complete(const Api& api, Request request, const std::shared_ptr<Exchange>& exchange);
  void take(Share& share, size_t bytes);
  Json parse(std::string_view body) const;
  void read(size_t size, std::function<void()> work);
  void start(const Api& api, std::string body, const std::shared_ptr<Job>& job,
             const std::shared_ptr<Exchange>& exchange);
  void check_run(std::string_view text) const;
  void check_runs(const Json& value) const;
  void check_task(const Task& task) const;
  Response refusal(const std::string& path, const Refusal& refusal);
  Response count(Response response);
  bool allows(const std::string& origin) const;
  std::optional<Refusal> stranger(const Request& head) const;
  Settings asked_settings(const Json& body) const;

  Response models(const Request& request);
  Response embeddings(const Request& request);
  Response tokens(const Request& request);
  Response count_tokens(const Request& request);
  Response health(const Request& request);
  Response metrics(const Request& request);
  Response state(const Request& request);
  Response change(const Request& request);
  Response kept(const Request& request);
  Response page(const Request& request);

  const Settings& settings_;
  const ServeFlags flags_;
  const Model& model_;
  const std::string model_name_;
  const int64_t started_;
  const size_t largest_text_;
  Room room_;  // counts the bytes of all requests and answers in progress
  // The retention that the command's heads serve; THIMBLE_RETENTION_DEFAULT: no heads.
  const int32_t heads_retention_;
  std::mutex responses_mutex_;
  std::map<int, uint64_t> responses_;  // number of responses by status
  std::atomic<uint64_t> next_id_;
  Scheduler scheduler_;
  Worker small_, large_, looks_;
};

}  // namespace app::serve
