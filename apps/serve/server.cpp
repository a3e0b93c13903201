// The server's paths and answers (see server.h).
#include "apps/serve/server.h"

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <random>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "apps/generation.h"
#include "apps/held.h"
#include "apps/serve/api_anthropic.h"
#include "apps/serve/api_openai.h"
#include "apps/serve/api_responses.h"
#include "apps/serve/json.h"
#include "apps/sizes.h"

namespace app::serve {

extern const char kPage[];  // page.html

// A wire format for answers.
struct Server::Api {
  Asked (*read)(const Json& body);
  std::unique_ptr<AnswerWriter> (*write)(const Identity& who, const Asked& asked);
  std::string (*error)(const Refusal& refusal);
};

struct Server::Route {
  const char* method;
  const char* path;
  bool open;                                    // also allowed without the key
  Response (Server::*respond)(const Request&);  // answers at once; else
  const Api* api;                               // a slot answers, in this format
  bool looks = false;                           // inspects a slot, which may have to wait for one step
};

namespace {

constexpr size_t kLargeBody = 64 << 10;

// In addition to the budget, the server uses 32 MiB, or a sixteenth of the budget if that is more: 8 MiB for
// the process itself, and the rest for texts. Tokenising a text takes about 12 times its bytes, for one text
// at a time. A text takes 2 to 3 times its bytes while it waits, is read, and is remembered. The room holds
// as many of these texts as there are slots, and two more, and at least four.
constexpr uint64_t kProcess = 8 << 20, kWhileRead = 12, kWhileHeld = 3;
uint64_t texts_at_once(uint32_t slots) { return std::max(slots + 2, 4u); }

size_t largest_text(uint64_t budget, uint32_t slots) {
  constexpr uint64_t kBeside = 32 << 20, kMost = 16 << 20;
  const uint64_t times = kWhileRead + kWhileHeld * texts_at_once(slots);
  return budget ? std::min((std::max(kBeside, budget / 16) - kProcess) / times, kMost) : kMost;
}
// A run of text that no pre-tokenizer splits takes another 40 times its bytes.
constexpr size_t kRunsInText = 8;

// The most bytes of memory that a JSON body takes while it is read: texts while they are tokenised; each
// text, array and object as values of the body, of the task and of the chat template; numbers as values and
// ids.
uint64_t bytes_to_read(std::string_view json) {
  constexpr uint64_t kPart = 160, kNumber = 40;
  uint64_t bytes = 0;
  bool inside = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (c == '"') {
      if (!inside) bytes += kPart;
      inside = !inside;
    } else if (inside) {
      bytes += kWhileRead;
      if (c == '\\') ++i;
    } else if (c == '{' || c == '[') {
      bytes += kPart;
    } else if (c == ',') {
      bytes += kNumber;
    }
  }
  return bytes;
}

// The bytes of the longest run of white space, or of other characters.
size_t longest_run(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  size_t longest = 0, begin = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (is_space(text[i]) != is_space(text[begin])) begin = i;
    longest = std::max(longest, i + 1 - begin);
  }
  return longest;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return text;
}

// The name in "Host: name:port", without the port; an IPv6 address without brackets.
std::string host_name(const std::string& host) {
  if (host.rfind('[', 0) == 0) return lower(host.substr(1, host.find(']') - 1));
  return lower(host.substr(0, host.find(':')));
}

// Compares keys in a time that does not depend on where they differ.
bool same_key(const std::string& given, const std::string& key) {
  unsigned difference = given.size() != key.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(key[i % key.size()]);
  return difference == 0;
}

int64_t now() {
  return static_cast<int64_t>(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now()));
}

const std::string kOneModel = "/v1/models/";

bool is_anthropic(const std::string& path) { return path.rfind("/v1/messages", 0) == 0; }

// Returns freed memory to the system, because the C library would keep it for the next large text.
void give_back_memory() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// A number in a query such as "slot=1&first=20", or nothing if it is missing.
std::optional<uint64_t> query_number(const std::string& query, const std::string& name) {
  const std::string all = "&" + query;
  const size_t found = all.find("&" + name + "=");
  if (found == all.npos) return std::nullopt;
  const size_t begin = found + name.size() + 2;
  const std::string digits = all.substr(begin, all.find('&', begin) - begin);
  if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != digits.npos)
    throw Refusal(400, "\"" + name + "\" must be a whole number");
  return std::stoull(digits);
}

// A slot's stream as sentences, each with the share of it that is still held, the share that is in the store
// of evicted entries, and its share of the answer's attention; and the sentences that the last question asks
// about. The result is the last fields of an object, as text, because a Json of a long stream would take many
// times its bytes. More than `most` bytes are a Refusal.
std::string sentences_json(const Model& model, const Scheduler::View& view, size_t most) {
  const std::vector<float> shares = kept_shares(view.session), stored = stored_shares(view.session);
  const auto sum = [](const std::vector<float>& values, const Sentence& s) {
    double all = 0;
    for (uint64_t i = s.first; i < std::min<uint64_t>(s.first + s.count, values.size()); ++i)
      all += static_cast<double>(values[i]);
    return all;
  };
  // Leaves out tokens that are queued but not read, and a token that an interrupted step sampled, which is in
  // no answer.
  const std::vector<int32_t>& ids = view.history.ids();
  const uint64_t count = std::min(shares.size(), ids.size());
  std::string out = R"("segments":[)";
  std::vector<Sentence> sentences;
  uint64_t first = 0;
  // Cuts at the ends of answers, because a template need not put answers on lines of their own. The subject
  // of a question is searched only outside of answers: an answer contains the question's words, and is still
  // held when the text's own sentence is gone.
  const auto cut_to = [&](uint64_t end, bool answer) {
    if (first >= end) return;
    for (Sentence& s :
         cut_sentences(end - first, [&](uint64_t i) { return token_bytes(model, ids[first + i]); })) {
      s.first += first;
      if (!sentences.empty()) out += ',';
      out += write_json({{"text", s.text},
                         {"first", s.first},
                         {"count", s.count},
                         {"kept", sum(shares, s) / static_cast<double>(s.count)},
                         {"stored", sum(stored, s) / static_cast<double>(s.count)},
                         {"attended", view.attended.empty() ? Json() : Json(sum(view.attended, s))}});
      if (out.size() > most)
        throw Refusal(
            413,
            "the stream's sentences take more memory than the server has; ask for a part, &first=0&count=10");
      if (answer) s.text.clear();
      sentences.push_back(std::move(s));
    }
    first = end;
  };
  for (const auto& [begin, end] : view.history.answers()) {
    cut_to(std::min(begin, count), false);
    cut_to(std::min(end, count), true);
  }
  cut_to(count, false);
  Json asked;
  if (const auto subject = find_subject(sentences, view.question, kept_by_head(model, view.session), stored))
    asked = {{"segment", subject->sentence},
             {"held", subject->held},
             {"stored", subject->stored},
             {"gone", subject->gone}};
  return out + R"(],"asked":)" + write_json(asked) + "}";
}

// The requested policies, in the form that POST /thimble/settings takes.
Json settings_json(const Settings& settings) {
  const thimble_session_options& o = settings.session;
  const char* retention = thimble_retention_name(o.retention);
  Json json = {{"retention", retention ? retention : "auto"},
               {"selection", thimble_selection_name(o.selection)},
               {"pool", o.pool}};
  if (o.selection != THIMBLE_SELECTION_DENSE && o.select_k) json["select-k"] = o.select_k;
  if (o.budget_bytes) json["mem-budget"] = o.budget_bytes;
  return json;
}

// The policies that a client may request. Of the policies that need heads, these are the ones that the
// command's heads can serve.
Json choices_json(int32_t heads_retention) {
  Json retentions = Json::array({"auto"}), selections = Json::array();
  for (int32_t i = 0; const char* name = thimble_retention_name(i); ++i)
    if (!needs_heads(i) || can_score(heads_retention, i)) retentions.push_back(name);
  for (int32_t i = 0; const char* name = thimble_selection_name(i); ++i) selections.push_back(name);
  return {{"retention", retentions}, {"selection", selections}};
}

// The share of `count` positions from `first` on that each head holds, as [layer][KV head].
Json heads_json(const Model& model, const Session& session, uint64_t first, uint64_t count) {
  const thimble_model_info info = model_info(model);
  Json layers(info.layers, Json::array());
  const std::vector<std::vector<int32_t>> heads = kept_by_head(model, session);
  for (size_t i = 0; i < heads.size(); ++i)
    layers[i / info.kv_heads].push_back(static_cast<double>(count_held(heads[i], first, count)) /
                                        static_cast<double>(count));
  return layers;
}

// Writes the progress of a job to its client.
class Answering : public Listener {
 public:
  using Refuse = std::function<Response(const Refusal&)>;
  Answering(std::shared_ptr<Exchange> exchange, std::unique_ptr<AnswerWriter> writer, bool stream,
            Refuse refuse, std::function<Response(Response)> count, Room& room)
      : exchange_(std::move(exchange)),
        writer_(std::move(writer)),
        stream_(stream),
        refuse_(std::move(refuse)),
        count_(std::move(count)),
        room_(room) {}

  void begun(const Usage& usage) override {
    if (stream_) exchange_->begin_events();
    show(writer_->begin(usage));
  }
  void piece(const Piece& piece) override {
    std::string bytes = writer_->piece(piece);
    // The slot, the writer, and the writer's last event or body each have a copy of the text.
    text_bytes_ += piece.text.size();
    const size_t taken = 4 * (text_bytes_ + writer_->kept_bytes());
    if (taken < kLargeBody)
      room_.force(taken);
    else if (!room_.resize(taken))
      throw Refusal(taken > most_ / 2 ? 413 : 503,  // it would hardly fit even as the only request
                    "the answer is too large for the server's memory; ask for a shorter one, without "
                    "log-probabilities, "
                    "or streamed");
    show(std::move(bytes));
  }
  void next(Ending ending) override { show(writer_->next(ending)); }
  void ended(Ending ending, const std::string& stop, const Usage& usage) override {
    std::string last = writer_->end(ending, stop, usage);
    if (!stream_) return exchange_->respond(count_({200, "application/json", std::move(last)}));
    count_({200, "application/json", ""});
    show(std::move(last));
    exchange_->end();
  }
  void failed(const Refusal& refusal) override {
    exchange_->fail(refuse_(refusal), writer_->failure(refusal));
  }

 private:
  void show(std::string bytes) {
    if (stream_) exchange_->write(std::move(bytes));
  }
  const std::shared_ptr<Exchange> exchange_;
  const std::unique_ptr<AnswerWriter> writer_;
  const bool stream_;
  const Refuse refuse_;
  const std::function<Response(Response)> count_;
  Share room_;
  const size_t most_ = room_.bound();
  size_t text_bytes_ = 0;
};

// A comment in the event stream, which clients skip. Proxies see from it that the connection is in use.
std::string progress_comment(const Job& job) {
  if (!job.reading) return job.total ? "" : ": waiting\n\n";
  return ": reading " + std::to_string(job.done) + "/" + std::to_string(job.total) + "\n\n";
}

}  // namespace

// ---- a thread that reads requests ----

Worker::Worker() {
  thread_ = std::thread([this] {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (stopping_) return;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      try {
        work();
      } catch (const std::exception&) {  // there is no memory to say so with
      }
      work = nullptr;
      lock.lock();
    }
  });
}

void Worker::post(std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (stopping_) return;  // and its connection hears nothing
  queue_.push_back(std::move(work));
  changed_.notify_one();
}

void Worker::stop() {
  std::deque<std::function<void()>> abandoned;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    abandoned.swap(queue_);
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// ---- paths ----

const Server::Route* Server::find_route(const std::string& path) {
  static constexpr Api kChat{read_chat_completion, write_chat_completion, openai_error};
  static constexpr Api kText{read_completion, write_completion, openai_error};
  static constexpr Api kResponse{read_response, write_response, openai_error};
  static constexpr Api kMessage{read_message, write_message, anthropic_error};
  static constexpr Route kRoutes[] = {
      {"POST", "/v1/chat/completions", false, nullptr, &kChat},
      {"POST", "/v1/completions", false, nullptr, &kText},
      {"POST", "/v1/responses", false, nullptr, &kResponse},
      {"POST", "/v1/embeddings", false, &Server::embeddings, nullptr},
      {"POST", "/v1/messages", false, nullptr, &kMessage},
      {"POST", "/v1/messages/count_tokens", false, &Server::count_tokens, nullptr},
      {"GET", "/v1/models", false, &Server::models, nullptr},
      {"GET", "/v1/models/ID", false, &Server::models, nullptr},
      {"POST", "/tokenize", false, &Server::tokens, nullptr},
      {"GET", "/health", true, &Server::health, nullptr},
      {"GET", "/metrics", false, &Server::metrics, nullptr},
      {"GET", "/thimble/state", false, &Server::state, nullptr},
      {"GET", "/thimble/kept", false, &Server::kept, nullptr, true},
      {"POST", "/thimble/settings", false, &Server::change, nullptr, true},
      {"GET", "/", true, &Server::page, nullptr},
  };
  const bool one_model = path.rfind(kOneModel, 0) == 0;
  for (const Route& route : kRoutes) {
    if ((one_model ? "/v1/models/ID" : path) == route.path) return &route;
  }
  return nullptr;
}

Server::Server(const Settings& settings, ServeFlags flags, const Model& model)
    : settings_(settings),
      flags_(std::move(flags)),
      model_(model),
      model_name_(utf8_path(native_path(settings.model).stem())),
      started_(now()),
      largest_text_(largest_text(settings.session.budget_bytes, flags_.slot_count())),
      room_(kWhileHeld * texts_at_once(flags_.slot_count()) * largest_text_),
      heads_retention_(settings.heads.empty()
                           ? THIMBLE_RETENTION_DEFAULT
                           : thimble_heads_retention(open_heads(model, settings.heads).get())),
      next_id_(std::random_device()()),
      scheduler_(settings, model, flags_, room_) {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 128 << 10);  // larger blocks return to the system when they are freed
#endif
}

void Server::stop() {
  looks_.stop();
  small_.stop();
  large_.stop();
  scheduler_.stop();
}

HttpLimits Server::limits() const {
  HttpLimits limits;
  limits.body_bytes = largest_text_;
  return limits;
}

std::string Server::error_body(const std::string& path, int status, const std::string& message) const {
  const Refusal refusal(status, message);
  return is_anthropic(path) ? anthropic_error(refusal) : openai_error(refusal);
}

Response Server::count(Response response) {
  const std::lock_guard lock(responses_mutex_);
  ++responses_[response.status];
  return response;
}

Response Server::refusal(const std::string& path, const Refusal& refusal) {
  Response response{refusal.status, "application/json",
                    is_anthropic(path) ? anthropic_error(refusal) : openai_error(refusal)};
  if (refusal.status == 429 || refusal.status == 503) response.headers.emplace_back("Retry-After", "1");
  if (refusal.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return count(std::move(response));
}

bool Server::allows(const std::string& origin) const {
  const auto same = [&](const std::string& allowed) { return lower(allowed) == lower(origin); };
  return std::any_of(flags_.allowed_origins.begin(), flags_.allowed_origins.end(), same);
}

// A page of another origin must not reach the server through its user's browser, not even under a host name
// that the page's owner has pointed at this machine. With a key there is no such check, because only pages
// that the user gave the key to have it.
std::optional<Refusal> Server::stranger(const Request& head) const {
  if (!flags_.key.empty()) return std::nullopt;
  const std::string name = host_name(head.host);
  std::vector<std::string> known = {"localhost",        "127.0.0.1",        "::1", host_name(flags_.host),
                                    lower(flags_.host), lower(head.address)};
  for (const std::string& allowed : flags_.allowed_hosts) known.push_back(host_name(allowed));
  if (std::find(known.begin(), known.end(), name) == known.end() || name.empty())
    return Refusal(
        403, "the server does not accept the host name \"" + name.substr(0, 200) +
                 "\"; ask for localhost, or start the server with --allowed-host NAME or with --api-key");
  if (head.origin.empty() || allows(head.origin)) return std::nullopt;
  const size_t scheme = head.origin.find("://");
  if (scheme == std::string::npos || lower(head.origin.substr(scheme + 3)) != lower(head.host))
    return Refusal(
        403,
        "the request comes from a page of another origin; start the server with --allowed-origin ORIGIN");
  return std::nullopt;
}

// The header that lets the browser show the answer to an allowed page.
std::string Server::headers(const Request& head) const {
  if (!allows(head.origin)) return "";
  return "Access-Control-Allow-Origin: " + head.origin + "\r\nVary: Origin\r\n";
}

std::optional<Response> Server::admit(const Request& head) {
  if (const auto refused = stranger(head)) return refusal(head.path, *refused);
  const Route* route = find_route(head.path);
  if (route && head.method == "OPTIONS" && allows(head.origin))  // a browser's preflight request
    return count({200,
                  "text/plain",
                  "",
                  {{"Access-Control-Allow-Methods", route->method},
                   {"Access-Control-Allow-Headers", "*, Authorization"},
                   {"Access-Control-Max-Age", "600"}}});
  const std::string kBearer = "Bearer ";
  const std::string given =
      head.authorization.rfind(kBearer, 0) == 0 ? head.authorization.substr(kBearer.size()) : head.api_key;
  if (!flags_.key.empty() && !(route && route->open) && !same_key(given, flags_.key))
    return refusal(
        head.path,
        Refusal(401, "the key is missing or wrong; send it as Authorization: Bearer KEY", "invalid_api_key"));
  if (!route) return refusal(head.path, Refusal(404, "there is no " + head.path.substr(0, 200) + " here"));
  if (head.method != route->method) {
    Response response =
        refusal(head.path, Refusal(405, std::string(route->path) + " takes " + route->method));
    response.headers.emplace_back("Allow", route->method);
    return response;
  }
  return std::nullopt;
}

void Server::handle(Request request, std::shared_ptr<Exchange> exchange) {
  const std::string path = request.path;
  try {
    dispatch(std::move(request), exchange);
  } catch (const std::exception& error) {
    exchange->respond(refusal(path, refusal_of(error)));
  }
}

void Server::dispatch(Request request, const std::shared_ptr<Exchange>& exchange) {
  const Route& route = *find_route(request.path);  // admit() has found it before
  if (route.api) return complete(*route.api, std::move(request), exchange);
  const bool reads = std::string(route.method) == "POST";
  const size_t size = request.body.size();
  const auto room = std::make_shared<Share>(room_);
  if (reads) take(*room, kWhileHeld * size);
  const auto respond = [this, &route, request = std::move(request), exchange, room] {
    try {
      exchange->respond(count((this->*route.respond)(request)));
    } catch (const std::exception& error) {
      exchange->respond(refusal(request.path, refusal_of(error)));
    }
  };
  if (route.looks)
    looks_.post(respond);
  else if (reads)
    read(size, respond);
  else
    respond();
}

void Server::take(Share& share, size_t bytes) {
  if (share.resize(bytes)) return;
  if (bytes > room_.bound())
    throw Refusal(413, "the request is too large: it takes " + format_size(bytes) +
                           " of memory, and the server has " + format_size(room_.bound()) + " for all");
  throw Refusal(503, "waiting requests fill the memory of the server; send this one again later");
}

Json Server::parse(std::string_view body) const {
  const uint64_t most = kWhileRead * largest_text_, needed = bytes_to_read(body);
  if (needed > most + kLargeBody) {
    check_json(body);  // invalid JSON is reported first
    throw Refusal(413, "the body has too many values: to read it takes up to " + format_size(needed) +
                           " of memory, and the server has " + format_size(most) +
                           "; send fewer messages, or a smaller text");
  }
  return parse_object(body);
}

// Reads one large request at a time, because its values take many times the bytes of the text. Small requests
// do not wait for large ones.
void Server::read(size_t size, std::function<void()> work) {
  if (size < kLargeBody) return small_.post(std::move(work));
  large_.post([work = std::move(work)]() mutable {
    work();
    work = nullptr;
    give_back_memory();
  });
}

// ---- answers of the model ----

void Server::complete(const Api& api, Request request, const std::shared_ptr<Exchange>& exchange) {
  const auto job = std::make_shared<Job>(room_);
  exchange->on_leave([this, job] { scheduler_.cancel(job); });
  exchange->every_second([job] { return job->streams ? progress_comment(*job) : ""; });
  const size_t size = request.body.size();
  take(job->room, kWhileHeld * size);
  const auto shared = std::make_shared<Request>(std::move(request));  // std::function copies its captures
  read(size, [this, &api, job, shared, exchange] {
    if (job->cancelled) return;
    try {
      start(api, std::move(shared->body), job, exchange);
    } catch (const std::exception& error) {
      exchange->respond(refusal(shared->path, refusal_of(error)));
    }
  });
}

void Server::check_run(std::string_view text) const {
  const size_t most = largest_text_ / kRunsInText;
  if (longest_run(text) > most)
    throw Refusal(413, "there is no memory to make tokens of more than " + std::to_string(most) +
                           " bytes without white space, or of white space alone; break the text into lines");
}

// Checks all texts in a value.
void Server::check_runs(const Json& value) const {
  if (value.is_string()) check_run(value.get_ref<const std::string&>());
  if (!value.is_structured()) return;
  for (const Json& part : value) check_runs(part);
}

void Server::check_task(const Task& task) const {
  for (const Json* part : {&task.messages, &task.tools, &task.variables, &task.begun}) check_runs(*part);
  check_run(task.prompt);
}

void Server::start(const Api& api, std::string body, const std::shared_ptr<Job>& job,
                   const std::shared_ptr<Exchange>& exchange) {
  const size_t size = body.size();
  Asked asked = api.read(parse(body));
  body = {};
  check_task(asked.task);
  job->prompt = scheduler_.prepare(asked.task);
  job->grammars = make_grammars(model_, asked.task);
  // A text with more tokens than usual takes more room, up to twice as much if each byte is a token. Many
  // small messages also take more.
  const size_t values = bytes_of(job->prompt.messages) + bytes_of(asked.task.tools);
  take(job->room, kWhileHeld * std::max(size, 2 * job->prompt.ids.size()) + values - std::min(values, size));
  char id[32];
  std::snprintf(id, sizeof id, "%016" PRIx64, next_id_++);
  auto writer = api.write({id, now(), model_name_}, asked);
  const auto refuse = [this, error = api.error](const Refusal& refused) {
    Response response = refusal("", refused);
    response.body = error(refused);
    return response;
  };
  job->listener = std::make_shared<Answering>(
      exchange, std::move(writer), asked.stream, refuse,
      [this](Response response) { return count(std::move(response)); }, room_);
  job->task = std::move(asked.task);
  if (!scheduler_.submit(job))
    throw Refusal(429, "all slots are busy and " + std::to_string(scheduler_.queue_limit()) +
                           " requests wait; try again later");
  job->streams = asked.stream;  // set only now, because after progress is shown the status is 200
}

// ---- what is answered at once ----

Response Server::models(const Request& request) {
  const thimble_model_info info = model_info(model_);
  const Json model = {{"id", model_name_},
                      {"object", "model"},
                      {"created", started_},
                      {"owned_by", "thimble"},
                      {"meta",
                       {{"architecture", info.architecture},
                        {"parameters", info.parameters},
                        {"vocab", info.vocab},
                        {"trained_context", info.context_length}}}};
  if (request.path.rfind(kOneModel, 0) != 0)
    return {200, "application/json", write_json({{"object", "list"}, {"data", Json::array({model})}})};
  if (request.path.substr(kOneModel.size()) != model_name_)
    throw Refusal(404, "this server does not have that model; GET /v1/models names the one it has",
                  "model_not_found");
  return {200, "application/json", write_json(model)};
}

Response Server::embeddings(const Request&) {
  throw Refusal(
      400, "this server writes text and makes no embeddings; send them to a server of an embedding model",
      "unsupported_endpoint");
}

Response Server::tokens(const Request& request) {
  const Json body = parse(request.body);
  const std::string* text = text_field(body, "content");
  if (!text) throw Refusal(400, "\"content\" is missing; it is the text");
  check_run(*text);
  const bool bos = bool_field(body, "add_special").value_or(false),
             special = bool_field(body, "parse_special").value_or(true);
  const uint32_t flags =
      (bos ? THIMBLE_TOKENIZE_ADD_BOS : 0) | (special ? THIMBLE_TOKENIZE_PARSE_SPECIAL : 0);
  std::string out = R"({"tokens":[)";
  for (const int32_t id : token_ids(model_, *text, flags)) out += std::to_string(id) + ",";
  if (out.back() == ',') out.pop_back();
  return {200, "application/json", out + "]}"};
}

Response Server::count_tokens(const Request& request) {
  Asked asked = read_message_to_count(parse_object(request.body));
  check_task(asked.task);
  return {200, "application/json", write_json({{"input_tokens", scheduler_.prepare(asked.task).ids.size()}})};
}

Response Server::health(const Request&) { return {200, "application/json", R"({"status":"ok"})"}; }

Response Server::metrics(const Request&) {
  std::string out;
  const auto metric = [&out](const char* name, const char* type, const char* help, double value) {
    char number[32];
    std::snprintf(number, sizeof number, "%.15g", value);
    out += std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n" + name + " " +
           number + "\n";
  };
  const auto whole = [](uint64_t value) { return static_cast<double>(value); };
  const Counts& c = scheduler_.counts();
  const thimble_memory memory = scheduler_.in_force().memory;
  const auto slots = scheduler_.slots();
  const auto busy = std::count_if(slots.begin(), slots.end(), [](const auto& slot) { return slot.busy; });
  metric("thimble_prompt_tokens_total", "counter", "Tokens of prompts.", whole(c.prompt_tokens));
  metric("thimble_prompt_tokens_cached_total", "counter", "Prompt tokens that were reused from the KV cache.",
         whole(c.cached_tokens));
  metric("thimble_generated_tokens_total", "counter", "Tokens generated.", whole(c.generated_tokens));
  metric("thimble_prompt_seconds_total", "counter", "Time spent in prefill.",
         whole(c.prompt_microseconds) / 1e6);
  metric("thimble_generation_seconds_total", "counter", "Time spent in decode.",
         whole(c.generation_microseconds) / 1e6);
  metric("thimble_waiting_seconds_total", "counter", "Time that requests waited for a slot.",
         whole(c.waiting_microseconds) / 1e6);
  metric("thimble_cancelled_total", "counter", "Requests whose clients left.", whole(c.cancelled));
  metric("thimble_failed_total", "counter", "Requests that failed in a slot.", whole(c.failed));
  metric("thimble_slots", "gauge", "Slots.", whole(slots.size()));
  metric("thimble_slots_busy", "gauge", "Busy slots.", static_cast<double>(busy));
  metric("thimble_queue_waiting", "gauge", "Requests that wait for a slot.", whole(scheduler_.waiting()));
  metric("thimble_in_flight_bytes", "gauge",
         "Bytes of requests and answers, and of texts that slots remember.", whole(room_.taken()));
  metric("thimble_in_flight_limit_bytes", "gauge", "Limit of thimble_in_flight_bytes.", whole(room_.bound()));
  if (PrefixCache* cache = scheduler_.cache()) {
    const PrefixCache::Size size = cache->size();
    metric("thimble_cache_states", "gauge", "Saved states in --cache-dir.", whole(size.states));
    metric("thimble_cache_bytes", "gauge", "Bytes of these states.", whole(size.bytes));
    metric("thimble_cache_limit_bytes", "gauge", "Limit of thimble_cache_bytes.", whole(size.limit));
  }
  metric("thimble_budget_bytes", "gauge", "Memory budget. 0 means no limit.", whole(memory.budget));
  metric("thimble_allocated_bytes", "gauge", "Bytes that all slots allocate.", whole(memory.allocated));
  out += "# HELP thimble_responses_total Responses by status.\n# TYPE thimble_responses_total counter\n";
  const std::lock_guard lock(responses_mutex_);
  for (const auto& [status, number] : responses_)
    out +=
        "thimble_responses_total{status=\"" + std::to_string(status) + "\"} " + std::to_string(number) + "\n";
  return {200, "text/plain; version=0.0.4", out};
}

Response Server::state(const Request&) {
  const Scheduler::InForce present = scheduler_.in_force();
  const thimble_memory& m = present.memory;
  const auto last = scheduler_.last();
  const std::string& problem = scheduler_.chat_problem();
  Json slots = Json::array();
  for (const auto& slot : scheduler_.slots())
    slots.push_back({{"busy", slot.busy}, {"position", slot.position}, {"pool", slot.pool}});
  return {200, "application/json",
          write_json({{"model", model_name_},
                      {"chat_problem", problem.empty() ? Json() : Json(problem)},
                      {"memory",
                       {{"budget", m.budget},
                        {"ceiling", settings_.session.budget_bytes},
                        {"allocated", m.allocated},
                        {"slot", memory_json(m)},
                        {"pool", m.pool},
                        {"capacity", m.capacity}}},
                      {"policies",
                       {{"retention", thimble_retention_name(present.retention)},
                        {"selection", thimble_selection_name(present.settings.session.selection)},
                        {"chunk", m.chunk}}},
                      {"settings", settings_json(present.settings)},
                      {"choices", choices_json(heads_retention_)},
                      {"slots", slots},
                      {"last", last ? Json(*last) : Json()},
                      {"queue", {{"waiting", scheduler_.waiting()}, {"limit", scheduler_.queue_limit()}}}})};
}

// The settings of the command, with the policy flags that the body names.
Settings Server::asked_settings(const Json& body) const {
  Settings asked = settings_;
  std::vector<std::string> flags;
  for (const auto& [name, value] : body.items()) {
    if (name == "pool" && flags_.slots.front().pool)
      throw Refusal(400, "the sizes of pools come from --slots, which can be given only on the command line");
    if (name == "heads")
      throw Refusal(
          400, "\"heads\" names a file, which can be given only on the command line; choose a \"retention\"");
    if (name.find_first_not_of("abcdefghijklmnopqrstuvwxyz-") != name.npos)
      throw Refusal(400,
                    "there is no setting of that name; names are those of the flags, \"pool\", \"select-k\"");
    if (value.is_boolean()) {
      if (value.get<bool>()) flags.push_back("--" + name);
    } else if (value.is_string() || value.is_number()) {
      flags.push_back("--" + name + "=" + (value.is_string() ? value.get<std::string>() : write_json(value)));
    } else {
      throw Refusal(400, "\"" + name + "\" must be a text, a number, or true");
    }
  }
  try {
    change_policies(asked, flags);
  } catch (const CLI::ParseError& error) {
    throw Refusal(400,
                  std::string(error.what()) + "; names are those of the flags in 'thimble serve --help'");
  } catch (const UsageError& error) {
    throw Refusal(400, error.what());
  }
  const int32_t retention = asked.session.retention;
  if (retention != THIMBLE_RETENTION_DEFAULT && retention != heads_retention_ &&
      !can_score(heads_retention_, retention))
    asked.heads.clear();
  const uint64_t ceiling = settings_.session.budget_bytes;
  if (ceiling && asked.session.budget_bytes > ceiling)
    throw Refusal(400, "the budget cannot be above " + format_size(ceiling) +
                           ", which the server was started with; restart it with a larger --mem-budget");
  return asked;
}

Response Server::change(const Request& request) {
  // A form on another page cannot send this content type, even if the browser hides the page's origin.
  if (lower(request.content_type).rfind("application/json", 0) != 0)
    throw Refusal(415, "settings must be JSON; send them with Content-Type: application/json");
  if (request.body.size() >= kLargeBody)
    throw Refusal(413, "the settings are too large; send only those that change");
  const Settings asked = asked_settings(parse_object(request.body));
  try {
    scheduler_.change(asked);
  } catch (const Failure& failure) {
    if (failure.status == THIMBLE_BUDGET) throw Refusal(400, failure.what());
    throw;
  }
  return state(request);
}

Response Server::kept(const Request& request) {
  const auto slot = query_number(request.query, "slot"), first = query_number(request.query, "first"),
             count = query_number(request.query, "count");
  if (!slot || !first != !count)
    throw Refusal(
        400, "the slot is missing: /thimble/kept?slot=0; for a part of its stream add &first=0&count=10");
  std::string out;
  scheduler_.look(*slot, [&](const Scheduler::View& view) {
    const uint64_t position = view.history.ids().size();
    if (!first) {
      const thimble_model_info info = model_info(model_);
      out = write_json(
          {{"slot", *slot}, {"position", position}, {"layers", info.layers}, {"kv_heads", info.kv_heads}});
      out.back() = ',';
      out += sentences_json(model_, view, room_.bound());
    } else if (*count > 0 && *first + *count <= position) {
      out = write_json({{"heads", heads_json(model_, view.session, *first, *count)}});
    } else {
      throw Refusal(400, "slot " + std::to_string(*slot) + " holds a stream of " + std::to_string(position) +
                             " tokens; \"first\" and \"count\" must be inside it");
    }
  });
  return {200, "application/json", std::move(out)};
}

Response Server::page(const Request&) {
  return {200,
          "text/html; charset=utf-8",
          kPage,
          {{"Cache-Control", "no-cache"},
           {"Content-Security-Policy",
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"}}};
}

}  // namespace app::serve
