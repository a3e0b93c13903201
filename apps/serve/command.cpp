// Implements `thimble serve`, which answers requests over HTTP.
#include "apps/options.h"
#include "apps/serve/flags.h"
#include "apps/sizes.h"

#if THIMBLE_SERVE
#include "apps/serve/server.h"
#endif

namespace app {

namespace {

constexpr uint32_t kMostSlots = 64;

// Reads "4", or "1x32768,3x4096": numbers of slots with the entries of their pools.
std::vector<serve::SlotKind> read_slots(const std::string& text) {
  std::vector<serve::SlotKind> kinds;
  uint32_t count = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    unsigned slots = 0, pool = 0;
    char rest = 0;
    const int read = std::sscanf(part.c_str(), "%5ux%9u%c", &slots, &pool, &rest);
    const bool sized = part.find('x') != part.npos;
    if (part.find_first_not_of("0123456789x") != part.npos || read != (sized ? 2 : 1) || slots == 0 ||
        (sized && pool == 0))
      throw CLI::ValidationError("--slots", "must be a number, or sizes such as 1x32768,3x4096");
    if ((count += slots) > kMostSlots)
      throw CLI::ValidationError("--slots", "must be from 1 to " + std::to_string(kMostSlots) + " in all");
    if (!kinds.empty() && !(sized && kinds.front().pool))
      throw CLI::ValidationError("--slots", "must give a size for all slots or for none");
    kinds.push_back({slots, pool});
    begin = end + 1;
  }
  std::sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) { return a.pool < b.pool; });
  return kinds;
}

#if THIMBLE_SERVE
// The slots in words: "2 slots with a pool of 1024 each".
std::string slots_text(const std::vector<serve::SlotKind>& kinds, uint32_t pool) {
  std::string text;
  for (const serve::SlotKind& kind : kinds)
    text += (text.empty() ? "" : ", ") + std::to_string(kind.count) + " slots with a pool of " +
            std::to_string(kind.pool ? kind.pool : pool) + " each";
  return text;
}

int serve_http(Settings& s, const serve::ServeFlags& flags) {
  const Model model = open_model(s.model);
  need_tokenizer(model);
  settle_seed(s);
  const Json variables =
      s.chat.variables.empty() ? Json::object() : Json::parse(s.chat.variables, nullptr, false);
  if (!variables.is_object())
    throw UsageError("--chat-vars must be a JSON object: '{\"enable_thinking\": false}'");
  serve::Server server(s, flags, model);
  try {
    serve::HttpServer http(
        flags.host, flags.port, server.limits(),
        {[&](const auto& head) { return server.admit(head); },
         [&](const auto& head) { return server.headers(head); },
         [&](auto request, auto exchange) { server.handle(std::move(request), std::move(exchange)); },
         [&](const auto& path, int status, const auto& message) {
           return server.error_body(path, status, message);
         }},
        server.room());
    const thimble_memory held = server.scheduler().in_force().memory;
    const bool v6 = flags.host.find(':') != std::string::npos;
    std::fprintf(stderr, "thimble: %s on http://%s%s%s:%u, %s, %s in all\n", s.model.c_str(), v6 ? "[" : "",
                 flags.host.c_str(), v6 ? "]" : "", http.port(), slots_text(flags.slots, held.pool).c_str(),
                 format_size(held.allocated).c_str());
    if (const std::string& problem = server.scheduler().chat_problem(); !problem.empty())
      std::fprintf(stderr, "thimble: no conversations: %s\n", problem.c_str());
    http.run([&] { server.stop(); });
  } catch (const Failure&) {
    throw;
  } catch (const std::runtime_error& error) {
    throw Failure(THIMBLE_IO, error.what());
  }
  return 0;
}
#else
int serve_http(Settings&, const serve::ServeFlags&) {
  throw Failure(THIMBLE_UNSUPPORTED,
                "this build has no server; build it with Boost 1.81 or newer (libboost1.81-dev), and "
                "not Windows");
}
#endif

}  // namespace

Command add_serve(CLI::App& root) {
  static Settings settings;
  static serve::ServeFlags flags;
  CLI::App* app = root.add_subcommand("serve", "Answer over HTTP with the APIs of OpenAI and Anthropic");
  add_model_flag(*app, settings);
  app->add_option("--host", flags.host, "Address or name to listen on (default: 127.0.0.1)")
      ->type_name("NAME");
  app->add_option("--port", flags.port, "Port; 0 means any free port (default: 8080)")->type_name("N");
  app->add_option("--api-key", flags.key, "Key that requests must have (default: none)")->type_name("KEY");
  app->add_option("--allowed-host", flags.allowed_hosts,
                  "Names that requests may call the server by, as \"box.lan\"; with --api-key any (default: "
                  "localhost, "
                  "its address, and --host)")
      ->type_name("NAME");
  app->add_option(
         "--allowed-origin", flags.allowed_origins,
         "Origins of web pages that may use the server, as \"https://chat.example\" (default: its own)")
      ->type_name("ORIGIN");
  app->add_option_function<std::string>(
         "--slots", [](const std::string& text) { flags.slots = read_slots(text); },
         "Requests that are answered at a time, each with a pool of its own inside the budget "
         "(default: 2, so that another question does not push a conversation out); or slots of several "
         "sizes, as 1x32768,3x4096: a request gets the smallest that holds it")
      ->type_name("N|NxPOOL,...");
  auto* cache = app->add_option("--cache-dir", flags.cache_dir,
                                "Folder in which states of what was read are saved and found again, also "
                                "after a restart (default: none; docs/server.md)")
                    ->type_name("DIR");
  app->add_option_function<std::string>(
         "--cache-size",
         [](const std::string& text) {
           const auto bytes = parse_size(text);
           if (!bytes)
             throw CLI::ValidationError("--cache-size", "'" + text + "' is not a size; write 500MiB or 8GB");
           flags.cache_bytes = *bytes;
         },
         "Limit for all files of --cache-dir; what was not used for longest is deleted (default: 8GiB)")
      ->needs(cache)
      ->type_name("SIZE");
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_session_flags(*app, settings);
  add_draft_flags(*app, settings);
  add_sampling_flags(*app, settings);
  app->footer(
      "The flags of the answer are defaults, which a request can override.\n"
      "In addition to --mem-budget the process takes up to 32 MiB or 1/16 of it, whichever is more.\n"
      "Requests and answers that do not fit in that memory get status 503 or 413 (docs/server.md).\n"
      "Ctrl-C ends the server.\n\n"
      "Examples:\n"
      "  thimble serve -m model.gguf --heads heads.gguf --mem-budget 1GiB\n"
      "  thimble serve -m model.gguf --mem-budget 8GB --slots 4 --host 0.0.0.0 --api-key SECRET");
  return {app, [app] {
            if (app->count("--api-key") && flags.key.empty()) throw UsageError("--api-key is empty");
            if (flags.slots.front().pool && settings.session.pool)
              throw UsageError("--slots gives the pools already; leave --pool out");
            return serve_http(settings, flags);
          }};
}

}  // namespace app
