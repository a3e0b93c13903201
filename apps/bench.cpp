// Implements `thimble bench`, which measures how fast a model reads and generates. Token ids are random, so
// any weights will do, and no tokenizer is needed.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct BenchFlags {
  uint32_t prompt = 512, generate = 128, repeats = 3;
};

// Tokens per second of all repeats, sorted.
struct TokenRates {
  std::vector<double> values;
  void add(uint64_t tokens, std::chrono::steady_clock::duration time) {
    values.push_back(static_cast<double>(tokens) / std::chrono::duration<double>(time).count());
    std::sort(values.begin(), values.end());
  }
  double median() const { return values[values.size() / 2]; }
};

// Bytes moved and operations computed per second in a phase of the last repeat, as the library counts them.
struct Speed {
  double bytes_per_second, flop_per_second;
  Speed(double seconds, double bytes, double flop)
      : bytes_per_second(bytes / seconds), flop_per_second(flop / seconds) {}
  // The share of the rate that the device reaches.
  double memory_share(const thimble_device_rates& r) const { return bytes_per_second / r.bytes_per_second; }
  double matrix_share(const thimble_device_rates& r) const { return flop_per_second / r.flop_per_second; }
};

int bench(Settings& s, const BenchFlags& flags) {
  const Model model = open_model(s.model);
  const Retention retention = choose_retention(s, model, flags.prompt);
  const thimble_model_info info = model_info(model);
  settle_seed(s);
  // Measured before the session is created, because the session's budget does not count the memory that
  // measuring takes.
  const thimble_device_rates rates = measure_device(s.device, s.session.threads);
  s.predict = flags.generate;
  Progress progress;
  thimble_session_options options = session_options(s, model, retention, flags.prompt);
  progress.attach(options);
  const Session session = create_session(model, options);
  const Interruptible interruptible(session);

  std::mt19937_64 random(static_cast<uint64_t>(s.seed));
  std::vector<int32_t> ids(flags.prompt);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % info.vocab);

  TokenRates prefill, decode;
  for (uint32_t r = 0; r < flags.repeats; ++r) {
    call(thimble_session_reset, session.get());
    const auto start = std::chrono::steady_clock::now();
    if (!read_prompt(session, ids, progress)) return kExitInterrupted;
    const auto middle = std::chrono::steady_clock::now();
    // Not generate(): a token that ends the text must not end the measurement.
    for (uint32_t i = 0; i < flags.generate; ++i) {
      int32_t token;
      if (!call_unless_interrupted(thimble_session_step, session.get(), &token)) return kExitInterrupted;
    }
    prefill.add(flags.prompt, middle - start);
    if (flags.generate) decode.add(flags.generate, std::chrono::steady_clock::now() - middle);
  }

  const thimble_memory held = memory(session);
  const thimble_stats seen = stats(session);
  warn_of_saturated(seen.saturated);
  const Speed reading(seen.prefill_seconds, seen.prefill_bytes, seen.prefill_flop);
  const Speed generating(seen.decode_seconds, seen.decode_bytes, seen.decode_flop);
  if (s.json) {
    Json out = {{"model", info.name},
                {"quantization", info.quantization},
                {"device", s.device},
                {"build", thimble_build_info()},
                {"repeats", flags.repeats},
                {"prompt_tokens", flags.prompt},
                {"generated_tokens", flags.generate},
                {"prefill_tps", prefill.median()},
                {"prefill_tps_min", prefill.values.front()},
                {"prefill_tps_max", prefill.values.back()}};
    out["decode_tps"] = flags.generate ? Json(decode.median()) : Json();
    out["decode_tps_min"] = flags.generate ? Json(decode.values.front()) : Json();
    out["decode_tps_max"] = flags.generate ? Json(decode.values.back()) : Json();
    auto add_speed = [&](const std::string& phase, const Speed& speed) {
      out[phase + "_bytes_per_second"] = speed.bytes_per_second;
      out[phase + "_flop_per_second"] = speed.flop_per_second;
      out[phase + "_memory_share"] = speed.memory_share(rates);
      out[phase + "_matrix_share"] = speed.matrix_share(rates);
    };
    add_speed("prefill", reading);
    if (flags.generate) add_speed("decode", generating);
    out["device_bytes_per_second"] = rates.bytes_per_second;
    out["device_flop_per_second"] = rates.flop_per_second;
    out["pool"] = held.pool;
    out["selected"] = seen.selected;
    out["saturated"] = seen.saturated;
    out["budget_bytes"] = held.budget;
    out["allocated_bytes"] = held.allocated;
    out["seed"] = s.seed;
    print_json(out);
    return 0;
  }
  std::printf("%s, %s, pool %s, %s allocated; tokens a second, %u repeats\n", info.name, info.quantization,
              format_count(held.pool).c_str(), format_size(held.allocated).c_str(), flags.repeats);
  std::printf("%-10s %8s %10s %10s %10s %9s %10s %8s %8s\n", "", "tokens", "median", "min", "max", "GB/s",
              "GFLOP/s", "memory", "matrix");
  auto row = [&](const char* name, uint32_t tokens, const TokenRates& tps, const Speed& speed) {
    std::printf("%-10s %8u %10.1f %10.1f %10.1f %9.1f %10.1f %6.1f %% %6.1f %%\n", name, tokens, tps.median(),
                tps.values.front(), tps.values.back(), speed.bytes_per_second / 1e9,
                speed.flop_per_second / 1e9, 100 * speed.memory_share(rates),
                100 * speed.matrix_share(rates));
  };
  row("prefill", flags.prompt, prefill, reading);
  if (flags.generate) row("decode", flags.generate, decode, generating);
  std::printf("memory, matrix: share of the peak of the device, measured now: %.1f GB/s, %.1f GFLOP/s\n",
              rates.bytes_per_second / 1e9, rates.flop_per_second / 1e9);
  return 0;
}

}  // namespace

Command add_bench(CLI::App& root) {
  static Settings settings;
  static BenchFlags flags;
  CLI::App* app = root.add_subcommand("bench", "Measure the speed of prefill and decode");
  add_model_flag(*app, settings);
  auto number = [app](const char* name, uint32_t& field, uint32_t least, const char* help) {
    app->add_option(name, field, help)->type_name("N")->check(CLI::Range(least, 1u << 30).description(""));
  };
  number("-p,--prompt-tokens", flags.prompt, 1, "Tokens to read (default: 512)");
  number("-n,--predict", flags.generate, 0, "Tokens to generate (default: 128)");
  number("-r,--repeats", flags.repeats, 1, "Repeats, of which the median is shown (default: 3)");
  add_json_flag(*app, settings);
  add_session_flags(*app, settings);
  app->footer(
      "Token ids are random (--seed). So the model needs no tokenizer, and its weights may be random.\n\n"
      "Examples:\n"
      "  thimble bench -m model.gguf -p 4096 -n 64\n"
      "  thimble bench -m model.gguf --heads heads.gguf --mem-budget 64MiB -p 32768 --json");
  return {app, [] { return bench(settings, flags); }};
}

}  // namespace app
