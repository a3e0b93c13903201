// HTTP/1.1 (see http.h). One thread does all of the work, so nothing here is locked. Exchanges post their
// calls to it.
#include "apps/serve/http.h"

#include <array>
#include <atomic>
#include <boost/asio.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <csignal>
#include <stdexcept>

namespace app::serve {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = boost::beast::http;
using tcp = asio::ip::tcp;
using boost::system::error_code;
using std::chrono::seconds;

namespace {

class Connection;

// The room counts answers up to this size in bytes, but never refuses them: a connection has one answer at a
// time, and the system takes most small answers at once.
constexpr size_t kSmallAnswer = 32 << 10;

}  // namespace

struct HttpServer::Impl {
  Impl(HttpLimits limits_, HttpHandlers handlers_, Room& room_)
      : limits(limits_), handlers(std::move(handlers_)), room(room_) {}
  HttpLimits limits;
  HttpHandlers handlers;
  Room& room;
  std::atomic<size_t> connections = 0;
  asio::io_context io{1};  // declared last, because it holds connections, which use the members above
  tcp::acceptor acceptor{io};
  asio::steady_timer pause{io};
  asio::signal_set signals{io, SIGINT, SIGTERM};

  void listen(const std::string& host, uint16_t port);
  void accept();
  void turn_away(tcp::socket socket);
};

namespace {

std::string response_head(int status, unsigned version, bool keep_alive, const std::string& fields) {
  const auto code = static_cast<http::status>(status);
  return std::string(version == 10 ? "HTTP/1.0 " : "HTTP/1.1 ") + std::to_string(status) + " " +
         std::string(http::obsolete_reason(code)) + "\r\n" + fields +
         (keep_alive ? "Connection: keep-alive\r\n" : "Connection: close\r\n") + "\r\n";
}

std::string whole_fields(const Response& response) {
  std::string fields = "Content-Type: " + response.type +
                       "\r\nContent-Length: " + std::to_string(response.body.size()) +
                       "\r\nX-Content-Type-Options: nosniff\r\n";
  for (const auto& [name, value] : response.headers) fields += name + ": " + value + "\r\n";
  return fields;
}

std::string text_of(boost::beast::string_view view) { return {view.data(), view.size()}; }

// The bytes of a header, including its empty line; 0: the header is incomplete. `problem` names what a proxy
// in front of this server may parse differently, so that it would see other requests than this server: a line
// that does not end with CR LF, or a field that continues in a second line.
struct Head {
  size_t bytes = 0;
  const char* problem = nullptr;
};

Head find_head(std::string_view text) {
  for (size_t line = 0;;) {
    const size_t end = text.find_first_of("\r\n", line);
    if (end == text.npos) return {};
    if (text[end] == '\n') return {0, "a line of the header ends without CR"};
    if (end + 1 == text.size()) return {};
    if (text[end + 1] != '\n') return {0, "a line of the header has a CR in the middle"};
    if (end == line) return {end + 2};
    if (line && (text[line] == ' ' || text[line] == '\t'))
      return {0, "a header field continues on a second line; send it on one line"};
    line = end + 2;
  }
}

// Refuses a request whose end or host could be read in two ways (RFC 9112, part 11.2). Returns a status and a
// sentence.
std::optional<Response> ambiguity(const http::request_header<>& head) {
  const auto refuse = [](int status, const char* message) { return Response{status, "", message}; };
  const size_t hosts = head.count(http::field::host), lengths = head.count(http::field::content_length),
               codings = head.count(http::field::transfer_encoding);
  if (hosts > 1) return refuse(400, "there are several Host fields");
  if (!hosts && head.version() > 10) return refuse(400, "the Host field is missing");
  if (lengths > 1) return refuse(400, "there are several Content-Length fields");
  if (lengths && head[http::field::content_length].find_first_not_of("0123456789") != std::string::npos)
    return refuse(400, "Content-Length must be one number");
  if (codings && lengths) return refuse(400, "there are both Content-Length and Transfer-Encoding");
  if (codings && head.version() == 10) return refuse(400, "HTTP/1.0 has no Transfer-Encoding");
  if (codings > 1 || (codings && !beast::iequals(head[http::field::transfer_encoding], "chunked")))
    return refuse(501, "the only Transfer-Encoding that the server supports is \"chunked\"");
  return std::nullopt;
}

// A client's connection. It repeatedly reads a request, hands it over, and writes the answer.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, HttpServer::Impl& server)
      : server_(server),
        limits_(server.limits),
        stream_(std::move(socket)),
        buffer_(2 * server.limits.header_bytes),
        ticker_(server.io),
        body_room_(server.room),
        answer_room_(server.room) {
    ++server_.connections;
  }
  ~Connection() { --server_.connections; }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void read_header(int timeout_seconds);

  // The functions that exchanges call; `turn` is the request to which a call belongs.
  HttpServer::Impl& server() { return server_; }
  void respond(uint64_t turn, Response response, Share room);
  void begin_events(uint64_t turn);
  void write(uint64_t turn, const std::string& bytes);
  void end(uint64_t turn);
  void abandon(uint64_t turn);
  void on_leave(std::function<void()> left) { left_ = std::move(left); }
  void every_second(std::function<std::string()> tick) { tick_ = std::move(tick); }

 private:
  using Parser = http::request_parser<http::string_body>;

  void read_head();
  void on_head();
  void read_body();
  void on_body(error_code error);
  void refuse(int status, const std::string& message);
  void refuse_parse(error_code error);
  void hand_over();
  void watch();
  void probe();
  void leave();
  std::string head(int status, const std::string& fields);
  void tick();
  void begin();
  void send(const std::string& bytes);
  void finish();
  void send_more();
  void on_sent(error_code error);
  void linger();
  void close();
  bool is_turn(uint64_t turn) const { return turn == turn_ && answering_; }

  HttpServer::Impl& server_;
  const HttpLimits& limits_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  asio::steady_timer ticker_;
  std::optional<Parser> parser_;
  Request request_;
  std::chrono::steady_clock::time_point body_deadline_;
  size_t drained_ = 0;
  unsigned version_ = 11;
  bool keep_alive_ = false, head_only_ = false;
  std::string fields_;  // lines of the answer's header that come from the handlers

  uint64_t turn_ = 0;
  bool answering_ = false;  // the request was handed over, and its answer has not ended
  bool events_ = false;     // the answer is sent in pieces
  bool ending_ = false;     // the whole answer is in out_ or is being sent
  bool begun_ = false;      // the beginning of its first line was sent
  bool writing_ = false, watching_ = false, closed_ = false;
  std::string out_, sending_;            // events, headers
  std::string body_out_, body_sending_;  // body of a whole answer, sent after these
  // Bytes of the request; bytes of the answer that the client has not taken.
  Share body_room_, answer_room_;
  std::function<void()> left_;
  std::function<std::string()> tick_;
};

class ConnectionExchange : public Exchange {
 public:
  ConnectionExchange(std::shared_ptr<Connection> connection, uint64_t turn, std::string path)
      : connection_(std::move(connection)), turn_(turn), path_(std::move(path)) {}
  ~ConnectionExchange() override {
    post([](Connection& c, uint64_t turn) { c.abandon(turn); });
  }
  void respond(Response response) override {
    Share room = take_room(response);
    post([response = std::move(response), room = std::move(room)](Connection& c, uint64_t turn) mutable {
      c.respond(turn, std::move(response), std::move(room));
    });
  }
  void begin_events() override {
    post([](Connection& c, uint64_t turn) { c.begin_events(turn); });
  }
  void write(std::string bytes) override {
    post([bytes = std::move(bytes)](Connection& c, uint64_t turn) { c.write(turn, bytes); });
  }
  void end() override {
    post([](Connection& c, uint64_t turn) { c.end(turn); });
  }
  void fail(Response response, std::string event) override {
    Share room = take_room(response);
    post([response = std::move(response), room = std::move(room), event = std::move(event)](
             Connection& c, uint64_t turn) mutable {
      c.respond(turn, std::move(response), std::move(room));  // has no effect if events were begun
      c.write(turn, event);
      c.end(turn);
    });
  }
  void on_leave(std::function<void()> left) override { connection_->on_leave(std::move(left)); }
  void every_second(std::function<std::string()> tick) override {
    connection_->every_second(std::move(tick));
  }

 private:
  // Takes room for a response until the client has taken it. If there is no room, replaces the response by
  // one that says so.
  Share take_room(Response& response) {
    HttpServer::Impl& server = connection_->server();
    Share room(server.room);
    const size_t size = response.body.size(), most = server.room.bound();
    if (size < kSmallAnswer) {
      room.force(size);
    } else if (!room.resize(size)) {
      const bool never = size > most;
      const std::string message = never ? "the answer of " + std::to_string(size) +
                                              " bytes is larger than the " + std::to_string(most) +
                                              " that the server has memory for"
                                        : "answers that clients have not read yet fill the memory "
                                          "of the server; send the request again later";
      response = {never ? 413 : 503, "application/json",
                  server.handlers.error_body(path_, never ? 413 : 503, message)};
      if (!never) response.headers.emplace_back("Retry-After", "1");
    }
    return room;
  }
  template <typename Body>
  void post(Body body) {
    asio::post(connection_->server().io, [connection = connection_, turn = turn_,
                                          body = std::move(body)]() mutable { body(*connection, turn); });
  }
  const std::shared_ptr<Connection> connection_;
  const uint64_t turn_;
  const std::string path_;
};

// ---- a request ----

void Connection::read_header(int timeout_seconds) {
  parser_.emplace();
  parser_->header_limit(static_cast<std::uint32_t>(limits_.header_bytes));
  parser_->body_limit(limits_.body_bytes);
  stream_.expires_after(seconds(timeout_seconds));
  request_ = {};
  head_only_ = false;
  fields_.clear();
  read_head();
}

// Checks the bytes of a whole header before it is parsed.
void Connection::read_head() {
  const auto text = [this] {
    return std::string_view(static_cast<const char*>(buffer_.data().data()), buffer_.size());
  };
  while (text().starts_with("\r\n")) buffer_.consume(2);  // some clients send CR LF after a body
  const Head found = find_head(text());
  if (found.problem) return refuse(400, found.problem);
  if (std::max(found.bytes, found.bytes ? 0 : buffer_.size()) > limits_.header_bytes)
    return refuse_parse(http::error::header_limit);
  if (found.bytes) return on_head();
  stream_.async_read_some(buffer_.prepare(std::min<size_t>(4096, buffer_.max_size() - buffer_.size())),
                          [self = shared_from_this()](error_code error, size_t got) {
                            if (error) return self->close();
                            self->buffer_.commit(got);
                            self->read_head();
                          });
}

void Connection::on_head() {
  error_code error;
  buffer_.consume(parser_->put(buffer_.data(), error));
  if (error) return refuse_parse(error);
  const auto& head = parser_->get();
  version_ = head.version();
  keep_alive_ = head.keep_alive();
  head_only_ = head.method() == http::verb::head;
  request_.method = head_only_ ? "GET" : text_of(head.method_string());
  std::string target = text_of(head.target());
  request_.host = text_of(head[http::field::host]);
  // A target in absolute form, as sent to a proxy, names the host. It takes precedence over the Host field.
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (!beast::iequals(target.substr(0, scheme.size()), scheme)) continue;
    const size_t path = std::min(target.find_first_of("/?", scheme.size()), target.size());
    request_.host = target.substr(scheme.size(), path - scheme.size());
    target = (target[path] == '/' ? "" : "/") + target.substr(path);
    break;
  }
  const size_t question = std::min(target.find('?'), target.size());
  request_.path = target.substr(0, question);
  request_.query = target.substr(std::min(question + 1, target.size()));
  request_.origin = text_of(head[http::field::origin]);
  request_.authorization = text_of(head[http::field::authorization]);
  request_.api_key = text_of(head["x-api-key"]);
  request_.content_type = text_of(head[http::field::content_type]);
  error_code ignored;
  if (const auto ambiguous = ambiguity(head)) return refuse(ambiguous->status, ambiguous->body);
  asio::ip::address address = stream_.socket().local_endpoint(ignored).address();
  if (address.is_v6() && address.to_v6().is_v4_mapped())  // with --host ::
    address = asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6());
  request_.address = address.to_string();
  fields_ = server_.handlers.headers(request_);
  if (const auto refused = server_.handlers.admit(request_)) {
    keep_alive_ = keep_alive_ && parser_->is_done();
    answering_ = true;
    return respond(++turn_, *refused, Share(server_.room));
  }
  if (beast::iequals(head[http::field::expect], "100-continue") && !parser_->is_done()) {
    out_ = "HTTP/1.1 100 Continue\r\n\r\n";
    send_more();
  }
  body_deadline_ = std::chrono::steady_clock::now() + seconds(limits_.body_seconds);
  read_body();
}

void Connection::read_body() {
  if (parser_->is_done()) return hand_over();
  stream_.expires_at(
      std::min(body_deadline_, std::chrono::steady_clock::now() + seconds(limits_.stall_seconds)));
  http::async_read_some(stream_, buffer_, *parser_,
                        [self = shared_from_this()](error_code error, size_t) { self->on_body(error); });
}

void Connection::on_body(error_code error) {
  if (error) return refuse_parse(error);
  if (!body_room_.resize(parser_->get().body().size()))
    return refuse(503, "other requests fill the memory of the server; send this one again later");
  read_body();
}

void Connection::refuse_parse(error_code error) {
  if (error == http::error::body_limit)
    return refuse(413, "the body is larger than " + std::to_string(limits_.body_bytes) +
                           " bytes, the most that the server has memory for");
  if (error == http::error::header_limit || error == http::error::buffer_overflow)
    return refuse(431, "the header is larger than " + std::to_string(limits_.header_bytes) + " bytes");
  if (error == beast::error::timeout ||
      error.category() != http::make_error_code(http::error::bad_method).category() ||
      error == http::error::end_of_stream || error == http::error::partial_message)
    return close();
  refuse(400, "the request is not HTTP/1.1: " + error.message());
}

// Answers an error in the request's syntax and ends the connection, because it is unclear where the next
// request begins.
void Connection::refuse(int status, const std::string& message) {
  keep_alive_ = false;
  answering_ = true;
  parser_.reset();
  body_room_.force(0);
  respond(++turn_, {status, "application/json", server_.handlers.error_body(request_.path, status, message)},
          Share(server_.room));
}

void Connection::hand_over() {
  stream_.expires_never();
  request_.body = std::move(parser_->get().body());
  body_room_.force(0);
  parser_.reset();
  answering_ = true;
  left_ = {};
  tick_ = {};
  const auto exchange = std::make_shared<ConnectionExchange>(shared_from_this(), ++turn_, request_.path);
  watch();
  server_.handlers.handle(std::move(request_), exchange);
  if (tick_) tick();
}

// While an answer is being made, no request is read from the socket. This waits for events on it: the bytes
// of an early next request are kept, and the end of the stream means that the client has left.
void Connection::watch() {
  if (watching_ || closed_) return;
  watching_ = true;
  stream_.socket().async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code error) {
    self->watching_ = false;
    if (error || !self->answering_) return;
    const size_t room = self->buffer_.max_size() - self->buffer_.size();
    self->stream_.socket().non_blocking(true, error);
    const size_t got =
        room ? self->stream_.socket().read_some(self->buffer_.prepare(std::min<size_t>(room, 4096)), error)
             : 0;
    self->buffer_.commit(got);
    if (error == asio::error::eof) return self->probe();
    if (!room || (error && error != asio::error::would_block)) return self->leave();
    self->watch();
  });
}

// A client that closed its sending side may still wait for its answer, or may have left. Sending it something
// shows which: the system of a client that left resets the connection. If the answer has not begun, this
// sends the beginning of its first line.
void Connection::probe() {
  if (ending_) return;  // then sending the answer shows it
  watching_ = true;
  stream_.socket().async_wait(tcp::socket::wait_error, [self = shared_from_this()](error_code error) {
    self->watching_ = false;
    if (!error) self->leave();
  });
  if (events_) return write(turn_, ":\n\n");
  out_ += head(0, "");
  send_more();
}

void Connection::leave() {
  if (!answering_) return;
  const auto left = std::exchange(left_, {});
  close();
  if (left) left();
}

// ---- its answer ----

void Connection::tick() {
  ticker_.expires_after(seconds(1));
  ticker_.async_wait([self = shared_from_this(), turn = turn_](error_code error) {
    if (error || !self->is_turn(turn) || self->ending_ || !self->tick_) return;
    const std::string bytes = self->tick_();
    if (!bytes.empty()) {
      self->begin_events(turn);
      self->write(turn, bytes);
    }
    if (self->is_turn(turn)) self->tick();
  });
}

// A response's header, or the rest of it if its beginning was already sent. Status 0 stands for that
// beginning.
std::string Connection::head(int status, const std::string& fields) {
  const std::string text = response_head(status, version_, keep_alive_, fields_ + fields);
  const size_t begun = text.find(' ') + 1;
  if (!status) return std::exchange(begun_, true) ? "" : text.substr(0, begun);
  return std::exchange(begun_, false) ? text.substr(begun) : text;
}

void Connection::respond(uint64_t turn, Response response, Share room) {
  if (!is_turn(turn) || events_ || ending_) return;
  out_ += head(response.status, whole_fields(response));
  if (!head_only_) body_out_ = std::move(response.body);
  answer_room_ = std::move(room);
  finish();
}

void Connection::begin_events(uint64_t turn) {
  if (!is_turn(turn) || events_ || ending_) return;
  events_ = true;
  keep_alive_ = keep_alive_ && version_ == 11;
  std::string fields =
      "Content-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n";
  if (version_ == 11) fields += "Transfer-Encoding: chunked\r\n";
  out_ += head(200, fields);
  send_more();
}

void Connection::write(uint64_t turn, const std::string& bytes) {
  if (!is_turn(turn) || !events_ || ending_ || bytes.empty()) return;
  const size_t unsent = out_.size() + bytes.size();
  if (unsent > limits_.unsent_bytes) return leave();
  if (unsent < kSmallAnswer)
    answer_room_.force(unsent);
  else if (!answer_room_.resize(unsent))
    return leave();
  char size[24];
  std::snprintf(size, sizeof size, "%zx\r\n", bytes.size());
  out_ += version_ == 11 ? size + bytes + "\r\n" : bytes;
  send_more();
}

void Connection::end(uint64_t turn) {
  if (!is_turn(turn) || !events_ || ending_) return;
  if (version_ == 11) out_ += "0\r\n\r\n";
  finish();
}

// Called when no answer will come any more, so that the client does not wait.
void Connection::abandon(uint64_t turn) {
  if (is_turn(turn) && !ending_) close();
}

void Connection::finish() {
  ending_ = true;
  ticker_.cancel();
  send_more();
  if (!writing_) on_sent({});  // everything was sent before the end was known
}

void Connection::send_more() {
  if (writing_ || closed_ || (out_.empty() && body_out_.empty())) return;
  writing_ = true;
  sending_ = std::exchange(out_, {});
  body_sending_ = std::exchange(body_out_, {});
  stream_.expires_after(seconds(limits_.stall_seconds));
  asio::async_write(stream_, std::array{asio::buffer(sending_), asio::buffer(body_sending_)},
                    [self = shared_from_this()](error_code error, size_t) { self->on_sent(error); });
}

void Connection::on_sent(error_code error) {
  writing_ = false;
  sending_ = body_sending_ = {};
  if (error) return answering_ ? leave() : close();
  if (!out_.empty() || !body_out_.empty()) return send_more();
  answer_room_.force(0);
  if (answering_) stream_.expires_never();
  if (!ending_) return;
  answering_ = events_ = ending_ = false;
  left_ = {};
  tick_ = {};
  if (!keep_alive_) return linger();
  if (watching_) stream_.socket().cancel(error);
  read_header(limits_.idle_seconds);
}

// If a connection is closed while the client still sends, the client loses the answer. So this reads and
// ignores its bytes for a while.
void Connection::linger() {
  error_code ignored;
  stream_.socket().cancel(ignored);
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
  buffer_.clear();
  stream_.expires_after(seconds(2));
  drained_ = 0;
  const auto drain = [](auto self, auto again) -> void {
    self->stream_.async_read_some(self->buffer_.prepare(4096), [self, again](error_code error, size_t got) {
      self->drained_ += got;
      if (error || self->drained_ > (1 << 20)) return self->close();
      again(self, again);
    });
  };
  drain(shared_from_this(), drain);
}

void Connection::close() {
  closed_ = true;
  answering_ = events_ = ending_ = false;
  left_ = {};
  tick_ = {};
  ticker_.cancel();
  error_code ignored;
  stream_.socket().close(ignored);
}

std::string url_host(const tcp::endpoint& endpoint) {
  const std::string address = endpoint.address().to_string();
  return endpoint.address().is_v6() ? "[" + address + "]" : address;
}

}  // namespace

// ---- the server ----

void HttpServer::Impl::listen(const std::string& host, uint16_t port) {
  error_code error;
  const auto found = tcp::resolver(io).resolve(host, std::to_string(port), error);
  if (error) throw std::runtime_error("'" + host + "' is not an address of this machine: " + error.message());
  for (const tcp::endpoint endpoint : found) {  // "localhost" may resolve to ::1 on a machine without IPv6
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(asio::socket_base::max_listen_connections, error);
    if (!error) return;
    error_code ignored;
    acceptor.close(ignored);
  }
  throw std::runtime_error("cannot listen on " + url_host(*found.begin()) + ":" + std::to_string(port) +
                           ": " + error.message());
}

void HttpServer::Impl::accept() {
  acceptor.async_accept([this](error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted || !acceptor.is_open()) return;
    if (error) {  // for example, no file descriptors are left
      pause.expires_after(std::chrono::milliseconds(100));
      pause.async_wait([this](error_code) {
        if (acceptor.is_open()) accept();
      });
      return;
    }
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    // Limits the send buffer, because otherwise the system keeps megabytes for each client that does not take
    // its answer.
    socket.set_option(tcp::socket::send_buffer_size(256 << 10), ignored);
    if (connections >= limits.connections)
      turn_away(std::move(socket));
    else
      std::make_shared<Connection>(std::move(socket), *this)->read_header(limits.header_seconds);
    accept();
  });
}

// Sends the reason if that is possible at once, and else nothing, because an excess connection must not cost
// anything.
void HttpServer::Impl::turn_away(tcp::socket socket) {
  error_code ignored;
  socket.non_blocking(true, ignored);
  const Response response{503, "application/json",
                          handlers.error_body("", 503, "there are too many connections; try again later")};
  const std::string bytes = response_head(503, 11, false, whole_fields(response)) + response.body;
  socket.write_some(asio::buffer(bytes), ignored);
}

HttpServer::HttpServer(const std::string& host, uint16_t port, HttpLimits limits, HttpHandlers handlers,
                       Room& room)
    : impl_(std::make_unique<Impl>(limits, std::move(handlers), room)) {
  impl_->listen(host, port);
}

HttpServer::~HttpServer() = default;

uint16_t HttpServer::port() const { return impl_->acceptor.local_endpoint().port(); }

size_t HttpServer::connections() const { return impl_->connections; }

void HttpServer::run(const std::function<void()>& stopping) {
  constexpr auto kGoodbye = std::chrono::milliseconds(300);
  asio::steady_timer goodbye(impl_->io);
  impl_->signals.async_wait([&](error_code error, int) {
    if (error) return;
    impl_->acceptor.close(error);
    stopping();
    goodbye.expires_after(kGoodbye);
    goodbye.async_wait([this](error_code) { impl_->io.stop(); });
  });
  impl_->accept();
  for (;;) {
    try {
      impl_->io.run();
      return;
    } catch (const std::exception&) {  // there is no memory for one connection; it ends with its handler
    }
  }
}

}  // namespace app::serve
