// HTTP/1.1 for the server, without the content: connections with limits and timeouts, answers sent as a whole
// or in pieces. Only http.cpp uses Boost.Beast.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/serve/room.h"

namespace app::serve {

struct Request {
  std::string method, path, query;                   // path without the query, not decoded
  std::string host, origin, authorization, api_key;  // headers; api_key is x-api-key
  std::string content_type;                          // likewise
  // The address of this machine to which the client connected.
  std::string address;
  std::string body;
};

struct Response {
  int status = 200;
  std::string type = "application/json", body;
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// Sends the answer to one request. Any thread may call it, and each call returns at once. Calls after the end
// of the answer, or after the client left, have no effect.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // Sends the whole answer.
  virtual void respond(Response response) = 0;
  // Begins an answer in pieces, as events (text/event-stream).
  virtual void begin_events() = 0;
  virtual void write(std::string bytes) = 0;
  virtual void end() = 0;
  // Sends an error. If events were begun, sends `event` and ends the answer; else sends `response`.
  virtual void fail(Response response, std::string event) = 0;
  // `left` is called once, on the server's thread, if the client leaves before the end. Call this only while
  // the request is handed over.
  virtual void on_leave(std::function<void()> left) = 0;
  // `tick` is called each second while events may be written, and its result is written. Call this only while
  // the request is handed over.
  virtual void every_second(std::function<std::string()> tick) = 0;
};

// Makes the body of an error that the HTTP layer reports.
using ErrorBody = std::function<std::string(const std::string& path, int status, const std::string& message)>;

struct HttpLimits {
  size_t header_bytes = 16 << 10;
  size_t body_bytes = 16 << 20;
  size_t unsent_bytes = 1 << 20;  // bytes of an answer that its client has not taken
  size_t connections = 256;
  int header_seconds = 10;  // to receive a request's header
  int idle_seconds = 60;    // between the requests of a connection
  // The longest time without receiving a byte of a body, or without the client taking one of an answer.
  int stall_seconds = 10;
  int body_seconds = 60;  // to receive a whole body
};

struct HttpHandlers {
  // Checks a request before its body is read. A returned response refuses it.
  std::function<std::optional<Response>(const Request& head)> admit;
  // Returns header lines for all answers to a request, each with its CR LF.
  std::function<std::string(const Request& head)> headers;
  // Handles a request. It runs on the server's thread, so it must return quickly.
  std::function<void(Request request, std::shared_ptr<Exchange> exchange)> handle;
  ErrorBody error_body;
};

class HttpServer {
 public:
  // Listens on `port`, or on a free port if it is 0. Throws a std::runtime_error with one sentence if it
  // cannot. Bodies, and answers that the client has not taken yet, are counted in `room`, which must outlive
  // the server.
  HttpServer(const std::string& host, uint16_t port, HttpLimits limits, HttpHandlers handlers, Room& room);
  ~HttpServer();
  uint16_t port() const;
  size_t connections() const;
  // Serves until Ctrl-C or SIGTERM. Then calls `stopping`, which must end all running jobs, sends their last
  // output, and returns.
  void run(const std::function<void()>& stopping);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace app::serve
