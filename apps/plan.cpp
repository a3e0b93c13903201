// Implements `thimble plan`, which shows the memory that a session would take, without allocating it.
#include <algorithm>
#include <cstdio>

#include "apps/generation.h"
#include "apps/options.h"
#include "apps/sizes.h"

namespace app {

namespace {

// A row for each layer; null for heads with a window.
Json by_layer(const std::vector<uint32_t>& keeps, const std::vector<uint32_t>& kv_heads) {
  Json rows = Json::array();
  auto keep = keeps.begin();
  for (const uint32_t heads : kv_heads) {
    Json& row = rows.emplace_back(Json::array());
    for (uint32_t head = 0; head < heads; ++head, ++keep) row.push_back(*keep ? Json(*keep) : Json());
  }
  return rows;
}

// If heads keep different numbers of entries, prints the least, the median and the most.
void print_unequal(std::vector<uint32_t> keeps) {
  keeps.erase(std::remove(keeps.begin(), keeps.end(), 0u), keeps.end());
  std::sort(keeps.begin(), keeps.end());
  if (keeps.empty() || keeps.front() == keeps.back()) return;
  std::printf("heads     %s entries in the smallest, %s in the median one, %s in the largest\n",
              format_count(keeps.front()).c_str(), format_count(keeps[(keeps.size() - 1) / 2]).c_str(),
              format_count(keeps.back()).c_str());
}

// What drafts add to the total of a session with the same pool.
uint64_t bytes_of_drafts(const Model& model, thimble_session_options options, const thimble_memory& memory) {
  options.pool = memory.pool;
  options.chunk = memory.chunk;
  options.budget_bytes = 0;
  const uint64_t total = plan(model, options).total;
  options.draft = THIMBLE_DRAFT_NONE;
  options.draft_model = nullptr;
  options.draft_tokens = 0;
  return total - plan(model, options).total;
}

int plan_command(const Settings& s, uint64_t tokens) {
  const Model model = open_model(s.model);
  const Retention retention = choose_retention(s, model, tokens);
  const thimble_model_info info = model_info(model);
  const thimble_session_options options = session_options(s, model, retention, tokens);
  const thimble_memory memory = plan(model, options);
  const uint64_t planned_tokens = tokens              ? tokens
                                  : s.session.context ? s.session.context
                                                      : info.context_length;
  const uint64_t dense_bytes = memory.dense_bytes_per_token * planned_tokens;
  const bool bounded = memory.largest_position != UINT32_MAX;
  const uint64_t largest_position = bounded ? memory.largest_position : planned_tokens;
  const bool selects = s.session.selection != THIMBLE_SELECTION_DENSE;
  uint32_t largest_pool = 0;
  if (options.budget_bytes) call(thimble_session_largest_pool, model.get(), &options, &largest_pool);

  const std::vector<uint32_t> keeps = plan_heads(model, options);
  const bool drafts = options.draft != THIMBLE_DRAFT_NONE;
  const uint64_t draft_bytes = drafts ? bytes_of_drafts(model, options, memory) : 0;

  if (s.json) {
    Json out = {{"memory", memory_json(memory)},
                {"total_bytes", memory.total},
                {"budget_bytes", memory.budget},
                {"pool", memory.pool},
                {"capacity", memory.capacity},
                {"keeps", by_layer(keeps, kv_heads(model))},
                {"chunk", memory.chunk},
                {"state_slots", memory.state_slots},
                {"key_format", kv_format_name(options.key_format)},
                {"value_format", kv_format_name(options.value_format)},
                {"finer_layers", memory.finer_layers},
                {"largest_position", bounded ? Json(memory.largest_position) : Json()},
                {"trained_positions", info.context_length},
                {"dense",
                 {{"tokens", planned_tokens},
                  {"bytes", dense_bytes},
                  {"bytes_per_token", memory.dense_bytes_per_token}}},
                {"selection_pays", selects ? Json(memory.selection_pays != 0) : Json()}};
    if (options.budget_bytes) out["largest_pool"] = largest_pool;
    if (drafts) out["drafts_bytes"] = draft_bytes;
    print_json(out);
    return 0;
  }
  std::printf("%s\n", memory_table(memory).c_str());
  std::printf("pool      %s entries a head, room for %s in the largest, read %s at a time\n",
              format_count(memory.pool).c_str(), format_count(memory.capacity).c_str(),
              format_count(memory.chunk).c_str());
  if (options.budget_bytes)
    std::printf("          the largest that fits the budget: %s\n", format_count(largest_pool).c_str());
  print_unequal(keeps);
  if (drafts) std::printf("drafts    take %s of the total\n", format_size(draft_bytes).c_str());
  if (options.key_format != THIMBLE_KV_F16 || options.value_format != THIMBLE_KV_F16)
    std::printf("formats   keys as %s, values as %s%s\n", kv_format_name(options.key_format),
                kv_format_name(options.value_format),
                s.kv_given ? "" : "; the budget has room for fewer entries as f16");
  if (memory.finer_layers)
    std::printf("formats   %s of %s layers store keys or values more finely than that (docs/design.md)\n",
                format_count(memory.finer_layers).c_str(), format_count(info.layers).c_str());
  if (memory.recall_bytes)
    std::printf(
        "recall    each generated token reads up to %s of the store, and those of the text's end do\n",
        format_size(memory.recall_bytes).c_str());
  if (memory.states)
    std::printf("states    %s a slot in %s slots, of which %s can hold a position to rewind to\n",
                format_size(memory.states / memory.state_slots).c_str(),
                format_count(memory.state_slots).c_str(), format_count(memory.state_slots - 2).c_str());
  std::printf("position  %s%s; the model was trained for %s%s\n", bounded ? "" : "grows with the text, to ",
              format_count(largest_position).c_str(), format_count(info.context_length).c_str(),
              largest_position > info.context_length ? ", so answers may be nonsense" : "");
  std::printf("dense     keys and values of all %s tokens would take %s\n",
              format_count(planned_tokens).c_str(), format_size(dense_bytes).c_str());
  if (selects && !memory.selection_pays) {
    std::printf(
        "selection saves nothing here: it reads as many bytes as dense attention to the whole pool\n");
  }
  return 0;
}

}  // namespace

Command add_plan(CLI::App& root) {
  static Settings settings;
  static uint64_t tokens = 0;
  CLI::App* app = root.add_subcommand("plan", "Show how much memory a session needs, without allocating it");
  add_model_flag(*app, settings);
  app->add_option("--tokens-planned", tokens,
                  "Length of the text, in tokens (default: -c, or what the model was trained for)")
      ->type_name("N")
      ->check(CLI::Range(uint64_t{1}, uint64_t{INT32_MAX}).description(""));
  add_predict_flag(*app, settings);
  add_json_flag(*app, settings);
  add_session_flags(*app, settings);
  add_draft_flags(*app, settings);
  app->footer(
      "The exit code is 1 if the session does not fit the budget. The message says how much is missing.\n\n"
      "Examples:\n"
      "  thimble plan -m model.gguf --heads heads.gguf --mem-budget 64MiB --tokens-planned 131072\n"
      "  thimble plan -m model.gguf --retention window --mem-budget 8GB --json");
  return {app, [] { return plan_command(settings, tokens); }};
}

}  // namespace app
