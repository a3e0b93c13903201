// Implements `thimble serve`, which answers requests over HTTP.
#include "apps/options.h"
#include "apps/serve/flags.h"

#if THIMBLE_SERVE
#include "apps/serve/server.h"
#include "apps/sizes.h"
#endif

namespace app {

namespace {

#if THIMBLE_SERVE
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
    std::fprintf(stderr, "thimble: %s on http://%s%s%s:%u, %u slots with a pool of %u each, %s in all\n",
                 s.model.c_str(), v6 ? "[" : "", flags.host.c_str(), v6 ? "]" : "", http.port(), flags.slots,
                 held.pool, format_size(held.allocated).c_str());
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
  app->add_option("--slots", flags.slots,
                  "Requests that are answered at a time, each with a pool of its own inside the budget "
                  "(default: 2, so that a question beside a conversation does not push it out)")
      ->type_name("N")
      ->check(CLI::Range(1, 64).description(""));
  add_predict_flag(*app, settings);
  add_chat_flags(*app, settings);
  add_session_flags(*app, settings);
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
            return serve_http(settings, flags);
          }};
}

}  // namespace app
