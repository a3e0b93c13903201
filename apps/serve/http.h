// HTTP/1.1 for the server, and nothing of what it says: connections with limits and timeouts, answers whole
// or in pieces. Boost.Beast stays in http.cpp.
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
  std::string address;                               // of this machine, that the connection came to
  std::string body;
};

struct Response {
  int status = 200;
  std::string type = "application/json", body;
  std::vector<std::pair<std::string, std::string>> headers = {};
};

// One request's way back. Any thread may call, and each call returns at once; what comes after the end, or
// after the client left, is dropped.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // The whole answer.
  virtual void respond(Response response) = 0;
  // Or one in pieces, as events (text/event-stream).
  virtual void begin_events() = 0;
  virtual void write(std::string bytes) = 0;
  virtual void end() = 0;
  // An error: the response, or where events were begun, the event and the end.
  virtual void fail(Response response, std::string event) = 0;
  // Called once, on the server's thread, where the client leaves before the end. To be set while the request
  // is handed over.
  virtual void on_leave(std::function<void()> left) = 0;
  // Called each second while events may be written; what it gives is. Likewise.
  virtual void every_second(std::function<std::string()> tick) = 0;
};

// What HTTP itself has to refuse becomes a body here.
using ErrorBody = std::function<std::string(const std::string& path, int status, const std::string& message)>;

struct HttpLimits {
  size_t header_bytes = 16 << 10;
  size_t body_bytes = 16 << 20;
  size_t unsent_bytes = 1 << 20;  // of an answer that its client does not take
  size_t connections = 256;
  int header_seconds = 10;  // for a request's header
  int idle_seconds = 60;    // between requests of a connection
  int stall_seconds = 10;   // without a byte of a body, or without taking one of an answer
  int body_seconds = 60;    // for a whole body
};

struct HttpHandlers {
  // Looks at a request before its body is read; a response refuses it.
  std::function<std::optional<Response>(const Request& head)> admit;
  // Lines of a header that all answers to it get, each with its CR LF.
  std::function<std::string(const Request& head)> headers;
  // Gets the request; runs on the server's thread, so it must not take long.
  std::function<void(Request request, std::shared_ptr<Exchange> exchange)> handle;
  ErrorBody error_body;
};

class HttpServer {
 public:
  // Listens; port 0 takes a free one. Throws a std::runtime_error with one sentence where it cannot. Bodies,
  // and answers that are not taken yet, are counted in `room`, which outlives the server.
  HttpServer(const std::string& host, uint16_t port, HttpLimits limits, HttpHandlers handlers, Room& room);
  ~HttpServer();
  uint16_t port() const;
  size_t connections() const;
  // Serves until Ctrl-C or SIGTERM; then calls `stopping`, which is to end what runs, sends what it says, and
  // returns.
  void run(const std::function<void()>& stopping);

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace app::serve
