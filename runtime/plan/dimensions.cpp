#include "runtime/plan/dimensions.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "runtime/plan/lay_out.h"

namespace thimble {
namespace {

// The run of a head that attends to every entry. If heads keep different numbers of entries, stabilizers are
// the same fraction of each head's entries.
HeadRun full_run(const SessionOptions& o, uint32_t keep) {
  HeadRun run;
  run.evicts = traits(o.retention).evicts();
  run.keep = keep;
  // Rows that are read again stay in the pool until the second reading.
  run.recall = o.most_recalled();
  run.capacity = keep + std::max(o.local + o.max_new, again_rows(o)) + run.recall;
  run.protect_first = std::min(o.protect_init, keep);
  run.protect_last = static_cast<uint32_t>(uint64_t(o.stabilizers) * keep / std::max(o.pool, 1u));
  return run;
}

// The run of a windowed head. It keeps its window, whatever the other heads keep.
HeadRun windowed_run(const SessionOptions& o, uint32_t window) {
  HeadRun run;
  run.evicts = true;
  run.keep = window;
  run.capacity = window + o.local + o.max_new;
  return run;
}

// The alignment in entries of a layer's arrays, if runs move. It aligns positions and scores for every
// device.
constexpr uint32_t kLayerAlignment = 64;

// The shares of the pool, [layer][kv head]. Empty: heads share it equally, or as options.keeps says.
std::span<const float> shares_of(const SessionOptions& o) {
  return o.keeps.empty() && o.shares ? std::span<const float>(*o.shares) : std::span<const float>();
}

// The number of entries that a head can use at most, however long the text is.
uint32_t most_used(const Model& model, const SessionOptions& o) {
  uint32_t most = o.positions == Positions::kList ? trained_entries(model, o) : UINT32_MAX;
  if (o.context) most = std::min(most, o.context);
  return std::max(most, o.pool);
}

// Divides the entries of equal pools by the shares. Each head gets at least `least` entries, so that the
// protected first entries leave room to choose, and at most `most`. What a head cannot take goes to heads
// with smaller shares.
std::vector<uint32_t> divide_pool(const Model& model, std::span<const float> shares, const SessionOptions& o,
                                  uint32_t most) {
  constexpr uint32_t kLeast = 64;
  constexpr double kRounding = 1e-6;  // of an entry; far larger than the errors of doubles
  const uint32_t least = std::min(o.pool, std::max(kLeast, 2 * (o.protect_init + 1)));
  const double floor = static_cast<double>(least) / o.pool;
  std::vector<uint32_t> keeps(shares.size(), o.pool);
  std::vector<uint32_t> heads;  // of layers without a window, by descending share, then by index
  for (uint32_t i = 0; i < shares.size(); ++i)
    if (!model.owner_of_run(i).window) heads.push_back(i);
  std::sort(heads.begin(), heads.end(),
            [&](uint32_t a, uint32_t b) { return shares[a] != shares[b] ? shares[a] > shares[b] : a < b; });
  // above[n]: the sum of the shares beyond the least one, over heads n and later.
  std::vector<double> above(heads.size() + 1, 0.0);
  for (size_t n = heads.size(); n-- > 0;) above[n] = above[n + 1] + std::max(0.0, shares[heads[n]] - floor);
  uint64_t left = uint64_t(o.pool - least) * heads.size();
  for (size_t n = 0; n < heads.size(); ++n) {
    const double part =
        above[n] > 0 ? (above[n] - above[n + 1]) / above[n] : 1 / static_cast<double>(heads.size() - n);
    const double more = std::ceil(static_cast<double>(left) * part - kRounding);
    keeps[heads[n]] = least + static_cast<uint32_t>(std::min<double>(more, most - least));
    left -= keeps[heads[n]] - least;
  }
  return keeps;
}

// The index of each run's first entry, with the entries of all layers one after the other. `moves`: those of
// windowed layers do not count, because they have arrays of their own.
std::vector<uint64_t> begins_of(const Model& model, const std::vector<HeadRun>& runs, bool moves) {
  std::vector<uint64_t> begins(1, 0);
  for (size_t i = 0; i < runs.size(); ++i)
    begins.push_back(begins.back() + (moves && model.owner_of_run(i).window ? 0 : runs[i].capacity));
  return begins;
}

// Places the runs of a windowed layer in its own arrays, one after the other. They are the same in every
// division.
uint32_t place_windows(const AttentionMixer& m, std::vector<Division>& divisions) {
  uint64_t entries = 0;
  for (uint32_t i = m.first_run; i < m.first_run + m.kv_heads; ++i) {
    for (Division& division : divisions) division.runs[i].first = static_cast<uint32_t>(entries);
    entries += divisions.front().runs[i].capacity;
  }
  return static_cast<uint32_t>(std::min<uint64_t>(entries, UINT32_MAX));
}

// Sets where runs begin in their layers' arrays. If runs move, they move between the arrays of all layers
// without a window.
void place_runs(const Model& model, Dimensions& d) {
  d.moves = d.divisions.size() > 1;
  if (!d.moves) d.divisions.clear();
  std::vector<std::vector<uint64_t>> begins;  // for each division
  for (const Division& division : d.divisions) begins.push_back(begins_of(model, division.runs, true));
  if (!d.moves) begins.push_back(begins_of(model, d.runs, false));
  for (const std::vector<uint64_t>& all : begins) d.pool_entries = std::max(d.pool_entries, all.back());
  const auto place = [&](uint64_t first, uint32_t entries) {
    d.layer_first.push_back(first);
    d.layer_entries.push_back(entries);
    d.most_layer_entries = std::max(d.most_layer_entries, entries);
  };
  for (const Layer& layer : model.layers) {
    const AttentionMixer* attention = layer.attention();
    if (!attention) {
      place(0, 0);
      continue;
    }
    if (!attention->has_keys()) {
      place(d.layer_first[attention->owner], d.layer_entries[attention->owner]);
      continue;
    }
    if (d.moves && attention->window) {
      place(0, place_windows(*attention, d.divisions));
      continue;
    }
    const uint32_t head = attention->first_run, kv_heads = attention->kv_heads;
    uint64_t first = UINT64_MAX, end = 0;
    for (const std::vector<uint64_t>& all : begins) {
      first = std::min(first, all[head]);
      end = std::max(end, all[head + kv_heads]);
    }
    if (d.moves) first -= first % kLayerAlignment;
    place(first, static_cast<uint32_t>(std::min<uint64_t>(end - first, UINT32_MAX)));
    for (uint32_t i = head; i < head + kv_heads; ++i) {
      if (!d.moves) d.runs[i].first = static_cast<uint32_t>(begins[0][i] - first);
      for (size_t k = 0; k < d.divisions.size(); ++k)
        d.divisions[k].runs[i].first = static_cast<uint32_t>(begins[k][i] - first);
    }
  }
  if (d.moves) d.runs = d.divisions.front().runs;
}

// The slots for the states of recurrent layers: one for the current states, one that the next step writes,
// and up to kMostSnapshots for rewinding. Snapshots take at most a 16th of the budget.
uint32_t state_slots(const Model& model, const SessionOptions& o) {
  uint64_t slot_bytes = 0;
  for (const Layer& layer : model.layers) slot_bytes += layer.state_bytes();
  if (!slot_bytes) return 0;
  const uint64_t fit = o.budget ? o.budget / 16 / slot_bytes : kMostSnapshots;
  return 2 + static_cast<uint32_t>(std::clamp<uint64_t>(fit, 1, kMostSnapshots));
}

// A chunk attends to latent channels, or to keys and values that it makes of them in every head. The latter
// takes fewer products for each row, and first those with the heads' matrices for each entry.
void plan_lifting(const Model& model, const SessionOptions& o, Dimensions& d) {
  constexpr uint64_t kMostLifted = 16 << 20, kFewest = 256;  // elements, entries
  if (model.query_growth != 0) return;                       // it changes the queries after their products
  for (const Layer& layer : model.layers) {
    const AttentionMixer* m = layer.attention();
    if (!m || !m->is_latent()) continue;
    const uint32_t rotated = m->k_rotated.rows, direct = 2 * m->latent() + rotated,
                   lifted = m->query_dim + m->value_dim;
    if (m->value_dim > m->query_dim || lifted >= direct) return;
    const uint32_t rows = m->latent() * (lifted - rotated) / (direct - lifted) + 1;
    if (o.chunk < rows) return;
    d.lifting_rows = std::max(d.lifting_rows, rows);
    d.lifted_capacity = static_cast<uint32_t>(std::min<uint64_t>(
        d.view_capacity, std::max(kFewest, kMostLifted / (2 * uint64_t(m->heads) * m->query_dim))));
  }
}

}  // namespace

std::vector<HeadRun> runs_for(const Model& model, const SessionOptions& o, uint64_t text) {
  const std::span<const float> shares = shares_of(o);
  std::vector<uint32_t> keeps = o.keeps;
  if (!shares.empty() && o.pool)
    keeps = divide_pool(
        model, shares, o,
        static_cast<uint32_t>(std::min<uint64_t>(std::max<uint64_t>(text, o.pool), most_used(model, o))));
  std::vector<HeadRun> runs;
  for (size_t i = 0; i < model.layer_of_run.size(); ++i) {
    const uint32_t window = model.owner_of_run(i).window;
    runs.push_back(window ? windowed_run(o, window) : full_run(o, keeps.empty() ? o.pool : keeps[i]));
  }
  return runs;
}

Dimensions dimensions(const Model& model, const SessionOptions& o, const Policies& policies) {
  Dimensions d;
  d.runs = runs_for(model, o, o.pool);
  d.evicts = std::any_of(d.runs.begin(), d.runs.end(), [](const HeadRun& run) { return run.evicts; });
  d.full_evict = traits(o.retention).evicts();
  const auto keep_alike = [](const HeadRun& a, const HeadRun& b) { return a.keep == b.keep; };
  const uint64_t most_text = shares_of(o).empty() ? 0 : most_used(model, o);
  for (uint64_t text = o.pool; text && text < 2 * most_text; text *= 2) {
    std::vector<HeadRun> runs = runs_for(model, o, text);
    if (d.divisions.empty() ||
        !std::equal(runs.begin(), runs.end(), d.divisions.back().runs.begin(), keep_alike))
      d.divisions.push_back({text, std::move(runs)});
  }
  place_runs(model, d);

  const uint32_t most_selected = policies.selection->most_attended(o);
  const bool chunks_select = policies.selection->selects_chunks(o);
  const uint32_t again = again_rows(o);
  uint32_t view_entries = 0;  // most entries that a chunk attends to
  const auto reach_of = [&](const HeadRun& run, bool windowed) {
    d.capacity = std::max(d.capacity, run.capacity);
    // A chunk either fits after the entries, or is read after as many entries as an eviction leaves. Rows
    // that a step reads again come in addition.
    uint32_t reach = run.evicts ? std::max(run.capacity + o.rebuild, run.keep + o.chunk) : run.capacity;
    if (again) reach = run.capacity + again;
    d.reach = std::max(d.reach, reach);
    const uint32_t most = windowed ? UINT32_MAX : most_selected;
    const uint32_t of_chunk = chunks_select && !again ? std::min(reach, most) : reach;
    view_entries = std::max(view_entries, of_chunk);
    d.largest_list = std::max({d.largest_list, of_chunk, std::min(run.capacity, most)});
  };
  for (uint32_t i = 0; i < d.runs.size(); ++i) {
    const bool windowed = model.owner_of_run(i).window != 0;
    reach_of(d.runs[i], windowed);
    for (const Division& division : d.divisions) reach_of(division.runs[i], windowed);
  }
  d.view_capacity = std::min(view_entries, kMaxViewEntries);
  d.view_passes = static_cast<uint32_t>(ceil_div(view_entries, d.view_capacity));
  plan_lifting(model, o, d);
  for (const Layer& layer : model.layers)
    for (const Mixer& mixer : layer.mixers)
      std::visit(
          [&](const auto& m) {
            d.mixer_cols = std::max(d.mixer_cols, m.first_cols());
            d.middle_cols = std::max(d.middle_cols, m.middle_cols());
            d.mixed_cols = std::max(d.mixed_cols, m.last_cols());
          },
          mixer);
  for (const Layer& layer : model.layers) {
    if (!layer.attention()) continue;
    d.qkv_cols = std::max(d.qkv_cols, layer.attention()->qkv_cols());
    d.kv_cols = std::max(d.kv_cols, layer.attention()->kv_cols());
  }
  d.state_slots = state_slots(model, o);
  if (d.state_slots) d.most_recent = uint64_t(d.capacity) + o.chunk;
  d.most_waiting = std::max<uint64_t>(uint64_t(o.chunk) + o.local + 1, d.most_recent);
  if (o.recalls_all()) d.stored = recall_shape(model, o).pages * kRecallPage;
  d.largest_list += d.stored;
  d.rope_positions = std::max(d.reach + d.stored, policies.selection->rope_positions(o));
  if (o.positions == Positions::kOriginal) d.rope_positions = std::max(d.rope_positions, o.context + again);
  return d;
}

}  // namespace thimble
