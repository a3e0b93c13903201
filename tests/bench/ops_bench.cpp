// Times ops through the seam on any device, in the shapes of real models: ops_bench DEVICE [--small] [--json]
// [CASE...].
//
// A case runs if its name contains one of the words given. Each is a program whose one segment holds the op
// many times, over enough operands that no cache holds what a model would read anew: every layer has its own
// weights and pool, but passes the same activations on. The time is the median submit and wait, divided by
// the number of ops. `--small` divides rows and entries by 64, so that a processor can run them all. The rate
// is what the op must move or multiply at least, counted below, by that time; its share of
// the device's measured bandwidth says how good the op is.
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "backends/registry.h"
#include "base/bits.h"
#include "tests/support/random.h"

namespace thimble {
namespace {

using test::Random;

// Rotating operands are together this large: five times the second-level cache of an H200.
constexpr uint64_t kColdBytes = 256u << 20;
constexpr uint32_t kMostSets = 64;
constexpr double kMostOps = 256;
constexpr uint32_t kSmall = 64;  // what --small divides by

struct Options {
  std::string device;
  std::vector<std::string> words;
  bool json = false, small = false;
};

// A case's operands. What does not fit the device is not allocated, and the case is skipped.
class Operands {
 public:
  explicit Operands(Device& device) : device_(device), free_bytes_(device.info().free_bytes) {}

  // Empty once something did not fit; why() says what.
  bool fit() const { return why_.empty(); }
  const std::string& why() const { return why_; }

  View bytes(uint64_t count, MemKind kind = MemKind::kWorkspace) {
    if (!fit()) return {};
    used_ += count;
    if (used_ > free_bytes_ - free_bytes_ / 16) {
      char text[128];
      std::snprintf(text, sizeof text, "needs more than %.1f GiB, and %.1f GiB are free",
                    double(used_) / (1 << 30), double(free_bytes_) / (1 << 30));
      why_ = text;
      return {};
    }
    auto buffer = device_.alloc(kind, count);
    if (!buffer.ok()) {
      why_ = buffer.status().message();
      return {};
    }
    buffers_.push_back(std::move(*buffer));
    return {buffers_.back().get(), 0, count};
  }
  template <typename T>
  View of(const std::vector<T>& values) {
    const View v = bytes(values.size() * sizeof(T));
    write(v, values.data());
    return v;
  }
  View floats(uint64_t count, float low = -1, float high = 1) {
    return repeated(count * sizeof(float), [&](std::byte* at) {
      const float f = random_.uniform(low, high);
      std::memcpy(at, &f, sizeof f);
      return sizeof f;
    });
  }
  View halves(uint64_t count) {
    return repeated(count * sizeof(uint16_t), [&](std::byte* at) {
      const uint16_t h = f32_to_f16(random_.uniform(-0.5f, 0.5f));
      std::memcpy(at, &h, sizeof h);
      return sizeof h;
    });
  }
  // A matrix of random blocks with small scales.
  Weight weight(DType type, uint32_t rows, uint32_t cols) {
    const DTypeInfo& info = dtype_info(type);
    Weight w;
    w.type = type;
    w.rows = rows;
    w.cols = cols;
    static_cast<View&>(w) = repeated(dtype_bytes(type, uint64_t(rows) * cols), [&](std::byte* at) -> size_t {
      for (uint32_t i = 0; i < info.block_bytes; ++i) at[i] = static_cast<std::byte>(random_.next());
      const uint16_t scale = f32_to_f16(random_.uniform(-0.01f, 0.01f));
      if (type == DType::kMXFP4)
        at[0] = std::byte{120};  // 2^-8
      else
        std::memcpy(at + (type == DType::kQ6_K ? 208 : 0), &scale, sizeof scale);
      if (type == DType::kQ4_K || type == DType::kQ5_K) std::memcpy(at + 2, &scale, sizeof scale);
      return info.block_bytes;
    });
    return w;
  }
  // Positions of the heads' runs: [0, capacity) of each.
  View positions(const std::vector<HeadState>& heads) {
    std::vector<int32_t> all;
    for (const HeadState& head : heads)
      for (uint32_t i = 0; i < head.capacity; ++i) all.push_back(static_cast<int32_t>(i));
    return of(all);
  }
  // A rope table of the right size; the angles are not those of a model.
  View rope(uint32_t positions, uint32_t head_dim) {
    return floats((65 + uint64_t(positions) / 64) * head_dim, -0.7f, 0.7f);
  }
  // Lists of `count` of n entries: the first n_init, the last n_local and random ones between, other ones for
  // each head.
  View lists(uint32_t heads, uint32_t n, uint32_t count, uint32_t n_init, uint32_t n_local) {
    std::vector<uint32_t> all, middle(n - n_init - n_local);
    for (uint32_t head = 0; head < heads; ++head) {
      std::iota(middle.begin(), middle.end(), n_init);
      const uint32_t picked = count - n_init - n_local;
      for (uint32_t i = 0; i < picked; ++i)
        std::swap(middle[i], middle[i + random_.below(static_cast<uint32_t>(middle.size()) - i)]);
      std::sort(middle.begin(), middle.begin() + picked);
      all.push_back(count);
      for (uint32_t i = 0; i < n_init; ++i) all.push_back(i);
      all.insert(all.end(), middle.begin(), middle.begin() + picked);
      for (uint32_t i = n - n_local; i < n; ++i) all.push_back(i);
    }
    return of(all);
  }
  Random& random() { return random_; }

 private:
  // Fills memory with what `put` writes one after the other, the same 16 MiB and a little again and again:
  // the little keeps rows of any power of two from repeating.
  template <typename Put>
  View repeated(uint64_t count, const Put& put) {
    const View v = bytes(count);
    if (!v) return v;
    constexpr uint64_t kPart = 16 << 20, kLittle = 64 * 210;
    std::vector<std::byte> part(std::min<uint64_t>(count, kPart + kLittle) + 4096);
    uint64_t filled = 0;
    while (filled < part.size() - 4096) filled += put(part.data() + filled);
    for (uint64_t at = 0; at < count; at += filled) {
      const uint64_t piece = std::min(filled, count - at);
      write(v.slice(at, piece), part.data());
    }
    return v;
  }
  void write(const View& v, const void* values) {
    if (!v || !v.bytes) return;
    const Status status = device_.write(v, values);
    if (!status.ok()) why_ = status.message();
  }

  Device& device_;
  uint64_t free_bytes_, used_ = 0;
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::string why_;
  Random random_;
};

// The work of a case: op(recorder, set) records it once over the operands of a set.
struct Work {
  ModelShape model;
  SessionShape session;
  uint32_t max_rows = 1;
  StepParams step;
  std::vector<HeadState> heads;  // the table
  uint32_t sets = 1;
  std::function<void(Recorder&, uint32_t set)> op;
  double bytes = 0, flop = 0;  // of one op, at least; 0: not what bounds it
};

struct Case {
  std::string name;
  std::function<Work(Operands&)> make;
};

class Bench {
 public:
  explicit Bench(const Options& o) : options_(o) {}

  Status open() {
    THIMBLE_LET(device, open_device(options_.device, {}));
    device_ = std::move(device);
    const DeviceInfo info = device_->info();
    view_element_bytes_ = info.view_element_bytes;
    if (!options_.json)
      std::printf("%s: %s%s\n\n%-46s %11s %10s %8s %10s %8s\n", info.name.c_str(), info.description.c_str(),
                  options_.small ? ", rows and entries divided by 64" : "", "case", "us", "MB", "GB/s",
                  "GFLOP", "TFLOP/s");
    return {};
  }

  uint32_t rows(uint32_t n) const { return scaled(n); }
  uint32_t entries(uint32_t n) const { return scaled(n); }
  uint32_t view_element_bytes() const { return view_element_bytes_; }
  // Operand sets that together are cold.
  uint32_t sets(uint64_t bytes) const {
    const uint64_t cold = options_.small ? kColdBytes / 8 : kColdBytes;
    return static_cast<uint32_t>(std::clamp<uint64_t>(ceil_div(cold, bytes), 1, kMostSets));
  }

  // Runs a case if it was asked for; false after a failure.
  bool run(const Case& c) {
    const auto asked = [&](const std::string& word) { return c.name.find(word) != std::string::npos; };
    if (!options_.words.empty() && std::none_of(options_.words.begin(), options_.words.end(), asked))
      return true;
    Operands operands(*device_);
    const Work work = c.make(operands);
    auto needs = device_->needs(work.model, work.session);
    if (!needs.ok()) return skipped(c, needs.status().message());
    const View scratch = operands.bytes(std::max<uint64_t>(needs->workspace, 1));
    if (!operands.fit()) return skipped(c, operands.why());
    auto stream = device_->open_stream(scratch, static_cast<uint32_t>(work.heads.size()));
    if (!stream.ok()) return failed(c, stream.status());

    // A program of about 2 ms, so that submitting costs nothing, with the same number of ops for each set.
    double us = 0;
    uint32_t ops = work.sets;
    for (const bool trial : {true, false}) {
      auto recorder = (*stream)->record(work.max_rows);
      recorder->segment();
      for (uint32_t i = 0; i < ops; ++i) work.op(*recorder, i % work.sets);
      auto program = (*stream)->finish(std::move(recorder));
      if (!program.ok()) return failed(c, program.status());
      auto times = measure(**stream, **program, work, trial ? 1 : 5);
      if (!times.ok()) return failed(c, times.status());
      us = (*times)[times->size() / 2] / ops;
      if (trial)
        ops = static_cast<uint32_t>(
            round_up(static_cast<uint64_t>(std::clamp(2000 / us, 1.0, kMostOps)), work.sets));
    }
    results_[c.name] = us;
    report(c, work, us, ops);
    return true;
  }

  // The time of a case that ran; 0: it did not.
  double microseconds(const std::string& name) const {
    const auto found = results_.find(name);
    return found == results_.end() ? 0 : found->second;
  }
  bool json() const { return options_.json; }

 private:
  uint32_t scaled(uint32_t n) const { return options_.small ? std::max(1u, n / kSmall) : n; }

  // Microseconds of at least `runs` submits, of half a second of them where there are several; sorted. One
  // more warms up.
  static Result<std::vector<double>> measure(Stream& stream, Program& program, const Work& work,
                                             size_t runs) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> times;
    const Clock::time_point start = Clock::now();
    bool warm = false;
    while (times.size() < runs || (runs > 1 && Clock::now() - start < std::chrono::milliseconds(500))) {
      const Clock::time_point before = Clock::now();
      THIMBLE_TRY(stream.submit(program, 0, 1, work.step, work.heads));
      THIMBLE_TRY(stream.wait());
      if (warm) times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - before).count());
      warm = true;
    }
    std::sort(times.begin(), times.end());
    return times;
  }

  void report(const Case& c, const Work& work, double us, uint32_t ops) const {
    if (options_.json) {
      std::printf("{\"case\":\"%s\",\"us\":%.3f,\"ops\":%u,\"bytes\":%.0f,\"flop\":%.0f}\n", c.name.c_str(),
                  us, ops, work.bytes, work.flop);
    } else {
      std::printf("%-46s %11.2f", c.name.c_str(), us);
      if (work.bytes > 0)
        std::printf(" %10.3f %8.1f", work.bytes / 1e6, work.bytes / us / 1e3);
      else if (work.flop > 0)
        std::printf(" %10s %8s", "", "");
      if (work.flop > 0) std::printf(" %10.3f %8.3f", work.flop / 1e9, work.flop / us / 1e6);
      std::printf("\n");
    }
    std::fflush(stdout);
  }
  bool skipped(const Case& c, const std::string& why) const {
    std::fprintf(stderr, "%s: skipped, %s\n", c.name.c_str(), why.c_str());
    return true;
  }
  bool failed(const Case& c, const Status& status) const {
    std::fprintf(stderr, "%s: %s\n", c.name.c_str(), status.message().c_str());
    return false;
  }

  Options options_;
  std::shared_ptr<Device> device_;
  uint32_t view_element_bytes_ = 4;
  std::map<std::string, double> results_;
};

// ---- shapes ----

struct Attending {  // heads of a model
  uint32_t kv_heads, group, dh;
  uint32_t heads() const { return kv_heads * group; }
  uint32_t width() const { return heads() * dh; }
  uint64_t entry_bytes() const { return uint64_t(kv_heads) * dh * 2; }  // of K or of V, f16
};
constexpr Attending kLlama{8, 4, 128}, kPhi{32, 1, 96}, kQwen{4, 7, 128}, kQwen3Heads{4, 8, 128},
    kGptOssHeads{8, 8, 64};
constexpr uint32_t kModel = 4096, kFf = 14336, kVocab = 128256, kKv = 1024;

ModelShape model_shape(const Attending& a = kLlama) {
  return {.layers = 1,
          .d_model = a.width(),
          .heads = a.heads(),
          .kv_heads = a.kv_heads,
          .head_dim = a.dh,
          .d_ff = kFf,
          .vocab = kVocab};
}
// Heads that hold so many entries each, with room for `room` more. Their runs follow each other.
std::vector<HeadState> runs(const std::vector<uint32_t>& entries, uint32_t room) {
  std::vector<HeadState> heads;
  uint32_t first = 0;
  for (const uint32_t n : entries) {
    heads.push_back({.first = first, .capacity = n + room, .n_entries = n});
    first += n + room;
  }
  return heads;
}
std::vector<HeadState> runs(const Attending& a, uint32_t entries, uint32_t room) {
  return runs(std::vector<uint32_t>(a.kv_heads, entries), room);
}
uint32_t layer_entries(const std::vector<HeadState>& heads) {
  return heads.back().first + heads.back().capacity;
}
uint32_t longest_run(const std::vector<HeadState>& heads) {
  uint32_t most = 0;
  for (const HeadState& head : heads) most = std::max(most, head.capacity);
  return most;
}
SessionShape session_shape(const std::vector<HeadState>& heads, uint32_t chunk, uint32_t view_capacity,
                           uint32_t positions = 0) {
  return {.chunk = chunk,
          .run_capacity = longest_run(heads),
          .layer_entries = layer_entries(heads),
          .reach = longest_run(heads) + chunk,
          .view_capacity = view_capacity,
          .positions = positions,
          .heads = static_cast<uint32_t>(heads.size())};
}
RopeParams rope_params(const Attending& a) {
  return {.mode = kRopeList, .pairing = kRopeHalves, .n_rot = a.dh};
}

// ---- dense ops ----

struct Matrix {
  DType type;
  uint32_t out, in;
  uint64_t bytes() const { return dtype_bytes(type, uint64_t(out) * in); }
};

// One matrix, or siblings that write columns side by side; or gate and up.
Work products(const Bench& b, Operands& o, const std::vector<Matrix>& matrices, uint32_t rows, bool is_glu,
              uint32_t of) {
  const uint32_t in = matrices[0].in;
  uint64_t weight_bytes = 0, out = 0;
  for (const Matrix& m : matrices) {
    weight_bytes += m.bytes();
    out += m.out;
  }
  const uint32_t y_stride = is_glu ? matrices[0].out : static_cast<uint32_t>(out);
  Work w{.model = model_shape(),
         .session = {.chunk = rows, .view_capacity = 64},
         .max_rows = rows,
         .step = {.n_rows = rows, .n_logit_rows = 1},
         .sets = b.sets(weight_bytes)};
  std::vector<std::vector<Weight>> sets(w.sets);
  for (auto& set : sets)
    for (const Matrix& m : matrices) set.push_back(o.weight(m.type, m.out, m.in));
  const View x = o.floats(uint64_t(rows) * in), y = o.bytes(uint64_t(rows) * y_stride * 4);
  w.op = [=](Recorder& r, uint32_t set) {
    if (is_glu) {
      r.record(Glu{x, sets[set][0], sets[set][1], y, {.in_cols = in, .out_cols = y_stride, .act = kActSilu}});
      return;
    }
    uint64_t column = 0;
    for (const Weight& m : sets[set]) {
      r.record(Linear{x,
                      m,
                      {},
                      y.slice(column * 4, y.bytes - column * 4),
                      {.in_cols = in, .out_cols = m.rows, .x_stride = in, .y_stride = y_stride, .rows = of}});
      column += m.rows;
    }
  };
  w.bytes = static_cast<double>(weight_bytes) + 4.0 * rows * (in + y_stride);
  w.flop = 2.0 * rows * in * static_cast<double>(out);
  return w;
}

void dense_cases(Bench& b, std::vector<Case>& cases) {
  const auto add = [&](const std::string& name, uint32_t rows, const std::vector<Matrix>& matrices,
                       bool is_glu = false, uint32_t of = kStepRows) {
    cases.push_back({name, [&b, matrices, rows, is_glu, of](Operands& o) {
                       return products(b, o, matrices, rows, is_glu, of);
                     }});
  };
  constexpr DType k4 = DType::kQ4_K, k6 = DType::kQ6_K;
  const Matrix square{k4, kModel, kModel};
  const std::vector<Matrix> qkv{square, {k4, kKv, kModel}, {k6, kKv, kModel}},
      ff{{k4, kFf, kModel}, {k4, kFf, kModel}};
  add("linear 1 row, q4_K [4096][4096]", 1, {square});
  add("linear 1 row, q k v", 1, qkv);
  add("glu 1 row, q4_K 2x[14336][4096]", 1, ff, true);
  add("linear 1 row, q6_K [4096][14336]", 1, {{k6, kModel, kFf}});
  add("linear 1 row, q6_K [128256][4096], logits", 1, {{k6, kVocab, kModel}}, false, kLogitRows);
  add("linear 1 row, q8_0 [4096][4096]", 1, {{DType::kQ8_0, kModel, kModel}});
  add("linear 1 row, q8_0 [201088][2880], logits", 1, {{DType::kQ8_0, 201088, 2880}}, false, kLogitRows);
  add("linear 1 row, f32 [128][2048], a router", 1, {{DType::kF32, 128, 2048}});
  for (const DType type : {DType::kQ4_0, DType::kQ5_K, DType::kIQ4_XS, DType::kMXFP4})
    add(std::string("linear 1 row, ") + dtype_info(type).name + " [4096][4096]", 1, {{type, kModel, kModel}});
  add("linear 1 row, f16 [4096][4096]", 1, {{DType::kF16, kModel, kModel}});
  for (const uint32_t rows : {2048u, 256u, 32u})
    add("linear " + std::to_string(rows) + " rows, q4_K [4096][4096]", b.rows(rows), {square});
  add("linear 2048 rows, f16 [4096][4096]", b.rows(2048), {{DType::kF16, kModel, kModel}});
  add("linear 2048 rows, q k v", b.rows(2048), {square, {k4, kKv, kModel}, {k4, kKv, kModel}});
  add("glu 2048 rows, q4_K 2x[14336][4096]", b.rows(2048), ff, true);
  add("linear 2048 rows, q4_K [4096][14336]", b.rows(2048), {{k4, kModel, kFf}});

  for (const uint32_t wanted : {1u, 2048u}) {
    const uint32_t rows = b.rows(wanted);
    cases.push_back(
        {"rms_norm " + std::to_string(wanted) + (wanted == 1 ? " row" : " rows"), [rows](Operands& o) {
           const View x = o.floats(uint64_t(rows) * kModel), norm = o.floats(kModel),
                      y = o.bytes(uint64_t(rows) * kModel * 4);
           Work w{.model = model_shape(),
                  .session = {.chunk = rows, .view_capacity = 64},
                  .max_rows = rows,
                  .step = {.n_rows = rows}};
           w.op = [=](Recorder& r, uint32_t) {
             r.record(RmsNorm{
                 x,
                 norm,
                 y,
                 {.cols = kModel, .groups = 1, .row_stride = kModel, .eps = 1e-5f, .rows = kStepRows}});
           };
           w.bytes = 8.0 * rows * kModel;
           return w;
         }});
  }
  cases.push_back({"arg_max 128256", [](Operands& o) {
                     const View x = o.floats(kVocab), index = o.bytes(4);
                     Work w{.model = model_shape(),
                            .session = {.chunk = 1, .view_capacity = 64},
                            .step = {.n_rows = 1, .n_logit_rows = 1}};
                     w.op = [=](Recorder& r, uint32_t) { r.record(ArgMax{x, index, {.cols = kVocab}}); };
                     w.bytes = 4.0 * kVocab;
                     return w;
                   }});
  cases.push_back({"embed 2048 rows, q4_K", [&b, rows = b.rows(2048)](Operands& o) {
                     const uint64_t row_bytes = dtype_bytes(DType::kQ4_K, kModel);
                     Work w{.model = model_shape(),
                            .session = {.chunk = rows, .view_capacity = 64},
                            .max_rows = rows,
                            .step = {.n_rows = rows},
                            .sets = b.sets(rows * row_bytes)};
                     std::vector<View> tokens;
                     for (uint32_t i = 0; i < w.sets; ++i) {
                       std::vector<int32_t> ids(rows);
                       for (int32_t& id : ids) id = static_cast<int32_t>(o.random().below(kVocab));
                       tokens.push_back(o.of(ids));
                     }
                     const Weight table = o.weight(DType::kQ4_K, kVocab, kModel);
                     const View x = o.bytes(uint64_t(rows) * kModel * 4);
                     w.op = [=](Recorder& r, uint32_t set) {
                       r.record(Embed{tokens[set], table, x, {.cols = kModel}});
                     };
                     w.bytes = rows * (4.0 * kModel + static_cast<double>(row_bytes));
                     return w;
                   }});
}

// ---- mixtures of experts ----

struct Mixture {
  const char* name;
  DType type;
  uint32_t experts, chosen, d_model, d_ff;
  bool biased;
  uint32_t act;
  uint64_t matrix_bytes() const { return dtype_bytes(type, uint64_t(experts) * d_ff * d_model); }
  uint64_t slots(uint32_t rows) const { return uint64_t(rows) * chosen; }
  // The bytes of a matrix that `rows` tokens read: those of the experts that any of them chose.
  double read_bytes(uint32_t rows) const {
    return static_cast<double>(matrix_bytes() / experts) *
           static_cast<double>(std::min<uint64_t>(slots(rows), experts));
  }
};
constexpr Mixture kQwen3Moe{"128 of 768, q4_K", DType::kQ4_K, 128, 8, 2048, 768, false, kActSilu},
    kGptOss{"32 of 2880, MXFP4", DType::kMXFP4, 32, 4, 2880, 2880, true, kActClamped};

// Where tokens go, each to experts drawn at random, as route writes it.
struct Routing {
  View first, row, weight;
  Routing(Operands& o, const Mixture& m, uint32_t rows) {
    std::vector<std::vector<uint32_t>> rows_of(m.experts);
    std::vector<uint32_t> experts(m.experts);
    std::iota(experts.begin(), experts.end(), 0u);
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t i = 0; i < m.chosen; ++i) {
        std::swap(experts[i], experts[i + o.random().below(m.experts - i)]);
        rows_of[experts[i]].push_back(r);
      }
    std::vector<uint32_t> firsts{0}, all;
    for (const std::vector<uint32_t>& of_expert : rows_of) {
      all.insert(all.end(), of_expert.begin(), of_expert.end());
      firsts.push_back(static_cast<uint32_t>(all.size()));
    }
    first = o.of(firsts);
    row = o.of(all);
    weight = o.floats(all.size(), 0, 0.25f);
  }
};

Work mixture_work(const Mixture& m, uint32_t rows) {
  Work w{.model = model_shape(),
         .session = {.chunk = rows, .view_capacity = 64},
         .max_rows = rows,
         .step = {.n_rows = rows, .n_logit_rows = 1}};
  w.model.d_model = m.d_model;
  w.model.d_ff = m.d_ff;
  w.model.experts = m.experts;
  w.model.chosen_experts = m.chosen;
  return w;
}

// Other matrices and other choices for each set, so that one row, which reads few experts, finds them cold.
enum class Part { kGlu, kLinear, kAll };  // kAll: as a step has them, route before both
Work expert_products(const Bench& b, Operands& o, const Mixture& m, uint32_t rows, Part part) {
  const bool glus = part != Part::kLinear, linears = part != Part::kGlu;
  Work w = mixture_work(m, rows);
  w.bytes = (2 * glus + linears) * m.read_bytes(rows);
  w.flop = 2.0 * (2 * glus + linears) * static_cast<double>(m.slots(rows)) * m.d_model * m.d_ff;
  w.sets = b.sets(static_cast<uint64_t>(w.bytes));
  std::vector<Weight> gates, downs;
  for (uint32_t i = 0; glus && i < 2 * b.sets(2 * m.matrix_bytes()); ++i)
    gates.push_back(o.weight(m.type, m.experts * m.d_ff, m.d_model));
  for (uint32_t i = 0; linears && i < b.sets(m.matrix_bytes()); ++i)
    downs.push_back(o.weight(m.type, m.experts * m.d_model, m.d_ff));
  const auto bias = [&](uint32_t cols) { return m.biased ? o.floats(uint64_t(m.experts) * cols) : View{}; };
  const View gate_bias = bias(m.d_ff), up_bias = bias(m.d_ff), down_bias = bias(m.d_model);
  std::vector<Routing> routes;
  std::vector<View> logits;
  for (uint32_t i = 0; i < w.sets; ++i) {
    routes.emplace_back(o, m, rows);
    logits.push_back(o.floats(uint64_t(rows) * m.experts, -4, 4));
  }
  const View x = o.floats(uint64_t(rows) * m.d_model), h = o.floats(m.slots(rows) * m.d_ff),
             y = o.floats(uint64_t(rows) * m.d_model);
  w.op = [=](Recorder& r, uint32_t set) {
    const Routing& to = routes[set];
    if (part == Part::kAll)
      r.record(
          Route{logits[set],
                {},
                to.first,
                to.row,
                to.weight,
                {.experts = m.experts, .chosen = m.chosen, .kind = kRouteSoftmax, .share = 1, .scale = 1}});
    if (glus) {
      const Weight* gate_up = &gates[set % (gates.size() / 2) * 2];
      r.record(ExpertGlu{x,
                         gate_up[0],
                         gate_up[1],
                         gate_bias,
                         up_bias,
                         to.first,
                         to.row,
                         h,
                         {.in_cols = m.d_model,
                          .out_cols = m.d_ff,
                          .act = m.act,
                          .experts = m.experts,
                          .chosen = m.chosen}});
    }
    if (linears)
      r.record(
          ExpertLinear{h,
                       downs[set % downs.size()],
                       down_bias,
                       to.first,
                       to.row,
                       to.weight,
                       y,
                       {.in_cols = m.d_ff, .out_cols = m.d_model, .experts = m.experts, .chosen = m.chosen}});
  };
  return w;
}

Work routes(Operands& o, const Mixture& m, uint32_t rows) {
  Work w = mixture_work(m, rows);
  const View logits = o.floats(uint64_t(rows) * m.experts, -4, 4), first = o.bytes((m.experts + 1) * 4),
             row = o.bytes(m.slots(rows) * 4), weight = o.bytes(m.slots(rows) * 4);
  const RouteParams p{
      .experts = m.experts, .chosen = m.chosen, .kind = kRouteSoftmax, .share = 1, .scale = 1};
  w.op = [=](Recorder& r, uint32_t) { r.record(Route{logits, {}, first, row, weight, p}); };
  w.bytes = 4.0 * rows * m.experts + 8.0 * static_cast<double>(m.slots(rows));
  return w;
}

// The convolution of LFM2-1.2B, whose matrices' rows are x, times and gate side by side.
void convolution_cases(Bench& b, std::vector<Case>& cases) {
  constexpr uint32_t kChannels = 2048, kTaps = 3;
  for (const uint32_t wanted : {1u, 2048u}) {
    const uint32_t rows = b.rows(wanted);
    cases.push_back(
        {"short_conv " + std::to_string(wanted) + (wanted == 1 ? " row" : " rows"), [rows](Operands& o) {
           const View x = o.floats(uint64_t(rows) * 3 * kChannels), w = o.floats(kChannels * kTaps),
                      y = o.floats(uint64_t(rows) * kChannels);
           const uint64_t tail = uint64_t(kTaps - 1) * kChannels * sizeof(float);
           const StateArray state{o.bytes(2 * tail).slice(0, tail), tail, 2};
           const ShortConvParams p{.channels = kChannels,
                                   .taps = kTaps,
                                   .x_column = 2 * kChannels,
                                   .times_column = 0,
                                   .gate_column = kChannels,
                                   .x_stride = 3 * kChannels,
                                   .y_stride = kChannels,
                                   .act = kActNone};
           return Work{.model = {.layers = 1, .d_model = kChannels},
                       .session = {.chunk = rows},
                       .max_rows = rows,
                       .step = {.n_rows = rows, .state_from = 0, .state_to = 1},
                       .op =
                           [=](Recorder& r, uint32_t) {
                             r.record(ShortConv{x, w, {}, state, y, p});
                           },
                       .bytes = double(x.bytes + y.bytes + w.bytes + 2 * tail)};
         }});
  }
}

// The delta rule of qwen3.5: 16 key heads, and 16 (2B), 32 (4B, 9B, 35B-A3B) or 48 value heads (27B).
void delta_cases(Bench& b, std::vector<Case>& cases) {
  constexpr uint32_t kKeys = 16, kWidth = 128;
  for (const uint32_t wanted : {1u, 2048u})
    for (const uint32_t values : {16u, 32u, 48u}) {
      const uint32_t rows = b.rows(wanted);
      cases.push_back({"delta_net " + std::to_string(wanted) + (wanted == 1 ? " row, " : " rows, ") +
                           std::to_string(values) + " heads",
                       [rows, values](Operands& o) {
                         const uint32_t columns = (2 * kKeys + values) * kWidth;
                         const View qkv = o.floats(uint64_t(rows) * columns),
                                    gates = o.floats(uint64_t(rows) * 2 * values),
                                    a = o.floats(values, -2, -0.1f), dt = o.floats(values, -3, 1),
                                    y = o.floats(uint64_t(rows) * values * kWidth);
                         const uint64_t size = uint64_t(values) * kWidth * kWidth * sizeof(float);
                         const StateArray m{o.bytes(2 * size).slice(0, size), size, 2};
                         const DeltaNetParams p{.key_heads = kKeys,
                                                .value_heads = values,
                                                .width = kWidth,
                                                .q_column = 0,
                                                .k_column = kKeys * kWidth,
                                                .v_column = 2 * kKeys * kWidth,
                                                .qkv_stride = columns,
                                                .alpha_column = 0,
                                                .beta_column = values,
                                                .gates_stride = 2 * values,
                                                .y_stride = values * kWidth,
                                                .eps = 1e-6f,
                                                .tiled = 1};
                         return Work{.model = {.layers = 1,
                                               .d_model = values * kWidth,
                                               .delta_keys = kKeys,
                                               .delta_values = values,
                                               .delta_width = kWidth},
                                     .session = {.chunk = rows},
                                     .max_rows = rows,
                                     .step = {.n_rows = rows, .state_from = 0, .state_to = 1},
                                     .op =
                                         [=](Recorder& r, uint32_t) {
                                           r.record(DeltaNet{qkv, gates, a, dt, m, y, p});
                                         },
                                     .bytes = double(qkv.bytes + gates.bytes + y.bytes + 2 * size)};
                       }});
    }
}

// Mamba-2 of nemotron-3-nano-30B, granite-4-h-tiny, and falcon-h1-7B.
void ssm_cases(Bench& b, std::vector<Case>& cases) {
  struct Shape {
    uint32_t heads, groups, width, state;
  };
  for (const uint32_t wanted : {1u, 2048u})
    for (const Shape s : {Shape{64, 8, 64, 128}, {48, 1, 64, 128}, {24, 1, 128, 256}}) {
      const uint32_t rows = b.rows(wanted);
      cases.push_back(
          {"ssm " + std::to_string(wanted) + (wanted == 1 ? " row, " : " rows, ") + std::to_string(s.heads) +
               " heads of " + std::to_string(s.width) + " x " + std::to_string(s.state),
           [rows, s](Operands& o) {
             const uint32_t values = s.heads * s.width, columns = values + 2 * s.groups * s.state;
             const View xbc = o.floats(uint64_t(rows) * columns), dt = o.floats(uint64_t(rows) * s.heads),
                        dt_bias = o.floats(s.heads, -3, 1), a = o.floats(s.heads, -2, -0.1f),
                        d = o.floats(s.heads), y = o.floats(uint64_t(rows) * values);
             const uint64_t size = uint64_t(values) * s.state * sizeof(float);
             const StateArray states{o.bytes(2 * size).slice(0, size), size, 2};
             const SsmParams p{.heads = s.heads,
                               .groups = s.groups,
                               .width = s.width,
                               .state = s.state,
                               .x_column = 0,
                               .b_column = values,
                               .c_column = values + s.groups * s.state,
                               .xbc_stride = columns,
                               .dt_column = 0,
                               .dt_stride = s.heads,
                               .y_stride = values};
             return Work{.model = {.layers = 1, .d_model = values, .ssm_heads = s.heads, .mixer_out = values},
                         .session = {.chunk = rows},
                         .max_rows = rows,
                         .step = {.n_rows = rows, .state_from = 0, .state_to = 1},
                         .op =
                             [=](Recorder& r, uint32_t) {
                               r.record(Ssm{xbc, dt, dt_bias, a, d, states, y, p});
                             },
                         .bytes = double(xbc.bytes + dt.bytes + y.bytes + 2 * size)};
           }});
    }
}

// What is around the delta rule of 32 value heads: the convolution, and the norm with its gate. "delta
// layer": all three, as a layer has them between its products.
void delta_layer_cases(Bench& b, std::vector<Case>& cases) {
  constexpr uint32_t kKeys = 16, kValues = 32, kWidth = 128, kTaps = 4;
  constexpr uint32_t kChannels = (2 * kKeys + kValues) * kWidth, kCols = kValues * kWidth;
  constexpr uint32_t kStride = kChannels + kCols + 2 * kValues;  // [qkv; z; beta; alpha]
  for (const uint32_t wanted : {1u, 2048u})
    for (const std::string name : {"short_conv of delta_net", "gated_norm", "delta layer"}) {
      const uint32_t rows = b.rows(wanted);
      cases.push_back({name + ", " + std::to_string(wanted) + (wanted == 1 ? " row" : " rows"),
                       [rows, name](Operands& o) {
                         const View x = o.floats(uint64_t(rows) * kStride), w = o.floats(kChannels * kTaps),
                                    middle = o.floats(uint64_t(rows) * kChannels),
                                    y = o.floats(uint64_t(rows) * kCols), a = o.floats(kValues, -2, -0.1f),
                                    dt = o.floats(kValues, -3, 1), weight = o.floats(kWidth);
                         const uint64_t tail = uint64_t(kTaps - 1) * kChannels * sizeof(float);
                         const uint64_t size = uint64_t(kValues) * kWidth * kWidth * sizeof(float),
                                        slot = tail + size;
                         const View state = o.bytes(2 * slot);
                         const ShortConv conv{.x = x,
                                              .w = w,
                                              .bias = {},
                                              .tail = {state.slice(0, tail), slot, 2},
                                              .y = middle,
                                              .p = {.channels = kChannels,
                                                    .taps = kTaps,
                                                    .x_column = 0,
                                                    .times_column = kNoColumn,
                                                    .gate_column = kNoColumn,
                                                    .x_stride = kStride,
                                                    .y_stride = kChannels,
                                                    .act = kActSilu}};
                         const DeltaNet net{middle,
                                            x,
                                            a,
                                            dt,
                                            {state.slice(tail, size), slot, 2},
                                            y,
                                            {.key_heads = kKeys,
                                             .value_heads = kValues,
                                             .width = kWidth,
                                             .q_column = 0,
                                             .k_column = kKeys * kWidth,
                                             .v_column = 2 * kKeys * kWidth,
                                             .qkv_stride = kChannels,
                                             .alpha_column = kChannels + kCols + kValues,
                                             .beta_column = kChannels + kCols,
                                             .gates_stride = kStride,
                                             .y_stride = kCols,
                                             .eps = 1e-6f,
                                             .tiled = 1}};
                         const GatedNorm norm{y,
                                              x,
                                              weight,
                                              y,
                                              {.cols = kWidth,
                                               .groups = kValues,
                                               .row_stride = kCols,
                                               .z_stride = kStride,
                                               .z_column = kChannels,
                                               .eps = 1e-6f,
                                               .order = kNormThenGate,
                                               .act = kActSilu}};
                         const bool all = name == "delta layer",
                                    convolves = all || name.starts_with("short_conv");
                         const bool norms = all || name == "gated_norm";
                         Work work{.model = {.layers = 1,
                                             .d_model = kCols,
                                             .delta_keys = kKeys,
                                             .delta_values = kValues,
                                             .delta_width = kWidth},
                                   .session = {.chunk = rows},
                                   .max_rows = rows,
                                   .step = {.n_rows = rows, .state_from = 0, .state_to = 1}};
                         work.op = [=](Recorder& r, uint32_t) {
                           if (convolves) r.record(conv);
                           if (all) r.record(net);
                           if (norms) r.record(norm);
                         };
                         if (convolves) work.bytes += 8.0 * rows * kChannels + double(2 * tail + w.bytes);
                         if (all) work.bytes += 4.0 * rows * (kChannels + kCols) + 2.0 * double(size);
                         if (norms) work.bytes += 12.0 * rows * kCols;
                         return work;
                       }});
    }
}

void mixture_cases(Bench& b, std::vector<Case>& cases) {
  for (const Mixture& m : {kQwen3Moe, kGptOss})
    for (const uint32_t wanted : {1u, 2048u}) {
      const uint32_t rows = b.rows(wanted);
      const std::string of = std::string(wanted == 1 ? " 1 row, " : " 2048 rows, ") + m.name;
      cases.push_back({"route" + of, [m, rows](Operands& o) { return routes(o, m, rows); }});
      for (const auto& [name, part] : {std::pair{"expert_glu", Part::kGlu},
                                       {"expert_linear", Part::kLinear},
                                       {"all of experts", Part::kAll}})
        cases.push_back({name + of, [&b, m, rows, part = part](Operands& o) {
                           return expert_products(b, o, m, rows, part);
                         }});
    }
}

// ---- reading: the view, attention over it, eviction ----

struct Chunk {
  Attending a;
  uint32_t rows, entries;  // entries with the rows
};

// Queries that see on average `entries - rows / 2` keys: q k^T and p v, 2 operations each.
double attention_flop(const Chunk& c) {
  return 4.0 * c.rows * (c.entries - (c.rows - 1) / 2.0) * c.a.heads() * c.a.dh;
}

KvViewParams view_params(const Chunk& c, uint32_t view_capacity, uint32_t list_capacity) {
  return {.heads = c.a.kv_heads,
          .head_dim = c.a.dh,
          .chunk_capacity = c.rows,
          .view_capacity = view_capacity,
          .list_capacity = list_capacity,
          .rope = rope_params(c.a)};
}
AttentionParams attention_params(const Attending& a, uint32_t source, uint32_t view_capacity,
                                 uint32_t list_capacity, bool equal_heads = true) {
  return {.heads = a.kv_heads,
          .group = a.group,
          .head_dim = a.dh,
          .row_stride = a.width(),
          .y_stride = a.width(),
          .source = source,
          .view_capacity = view_capacity,
          .list_capacity = list_capacity,
          .equal_heads = equal_heads,
          .scale = 0.0883883f,
          .rope = rope_params(a)};
}
bool all_equal(const std::vector<HeadState>& heads) {
  return std::all_of(heads.begin(), heads.end(),
                     [&](const HeadState& head) { return head.n_entries == heads[0].n_entries; });
}

// `heads`: entries of each without the rows; the view has room for the longest.
Work view_attention(const Bench& b, Operands& o, const Attending& a, uint32_t rows,
                    const std::vector<uint32_t>& heads) {
  const uint32_t most = rows + *std::max_element(heads.begin(), heads.end());
  Work w{.model = model_shape(a), .max_rows = rows, .step = {.n_rows = rows}, .heads = runs(heads, 1)};
  w.session = session_shape(w.heads, rows, most);
  // One view serves all layers, so it is as warm as kv_view leaves it.
  const uint64_t elements = uint64_t(a.kv_heads) * most * a.dh;
  const View k = b.view_element_bytes() == 2 ? o.halves(elements) : o.floats(elements),
             v = b.view_element_bytes() == 2 ? o.halves(elements) : o.floats(elements),
             q = o.floats(uint64_t(rows) * a.width()), y = o.bytes(uint64_t(rows) * a.width() * 4),
             ml = o.bytes(uint64_t(rows) * a.heads() * 8), table = o.rope(most, a.dh);
  const AttentionParams p = attention_params(a, kFromView, most, 0, all_equal(w.heads));
  w.op = [=](Recorder& r, uint32_t) { r.record(Attention{q, {k}, {v}, {}, table, {}, y, ml, p}); };
  for (const uint32_t entries : heads) w.flop += attention_flop({a, rows, entries + rows}) / a.kv_heads;
  return w;
}

// Pool and chunk buffer of layers; the chunk buffer is shared.
struct Layers {
  std::vector<View> k, v, pos, cis;
  View chunk_k, chunk_v, chunk_pos, chunk_cis;
  Layers(Operands& o, const Chunk& c, uint32_t sets, bool scored) {
    const uint32_t capacity = c.entries - c.rows;
    const uint64_t pool = uint64_t(c.a.kv_heads) * capacity, chunk = uint64_t(c.a.kv_heads) * c.rows;
    for (uint32_t i = 0; i < sets; ++i) {
      k.push_back(o.halves(pool * c.a.dh));
      v.push_back(o.halves(pool * c.a.dh));
      pos.push_back(o.positions(runs(c.a, capacity, 0)));
      if (scored) cis.push_back(o.floats(pool));
    }
    chunk_k = o.halves(chunk * c.a.dh);
    chunk_v = o.halves(chunk * c.a.dh);
    chunk_pos = o.positions(runs(c.a, c.rows, 0));
    if (scored) chunk_cis = o.floats(chunk);
  }
};

// Entries of eight heads of which one has kept far more than the others: as many as these, and 64 each.
std::vector<uint32_t> one_long(const Bench& b, uint32_t entries) {
  std::vector<uint32_t> heads(kLlama.kv_heads, b.entries(64));
  heads[3] = b.entries(entries);
  return heads;
}

void reading_cases(Bench& b, std::vector<Case>& cases) {
  const Chunk llama{kLlama, b.rows(2048), b.entries(18432)}, half{kLlama, b.rows(512), b.entries(18432)},
      phi{kPhi, b.rows(2048), b.entries(8048)};
  const auto add_attention = [&](const std::string& name, const Chunk& c) {
    cases.push_back({name, [&b, c](Operands& o) {
                       return view_attention(b, o, c.a, c.rows,
                                             std::vector<uint32_t>(c.a.kv_heads, c.entries - c.rows));
                     }});
  };
  add_attention("attention 2048 rows, 18432 entries", llama);
  add_attention("attention 512 rows, 18432 entries", half);
  add_attention("attention 2048 rows, 8048 entries, phi-3", phi);
  for (const uint32_t rows : {512u, 2048u})
    cases.push_back(
        {"attention " + std::to_string(rows) + " rows, 16384 and 7 x 64 entries",
         [&b, rows](Operands& o) { return view_attention(b, o, kLlama, b.rows(rows), one_long(b, 16384)); }});

  cases.push_back({"kv_view 18432 entries", [&b, llama](Operands& o) {
                     Work w{.model = model_shape(),
                            .max_rows = llama.rows,
                            .step = {.n_rows = llama.rows},
                            .heads = runs(kLlama, llama.entries - llama.rows, 0),
                            .sets = b.sets(2 * kLlama.entry_bytes() * llama.entries)};
                     w.session = session_shape(w.heads, llama.rows, llama.entries);
                     const Layers l(o, llama, w.sets, false);
                     const uint64_t bytes = kLlama.entry_bytes() / 2 * llama.entries * b.view_element_bytes();
                     const View k = o.bytes(bytes), v = o.bytes(bytes),
                                table = o.rope(llama.entries, kLlama.dh);
                     const KvViewParams p = view_params(llama, llama.entries, 0);
                     w.op = [=](Recorder& r, uint32_t set) {
                       r.record(KvView{{l.k[set]}, {l.v[set]}, {l.chunk_k}, {l.chunk_v}, {}, table, k, v, p});
                     };
                     w.bytes = 2.0 * static_cast<double>(kLlama.entry_bytes() * llama.entries + bytes);
                     return w;
                   }});
  const uint32_t keep = llama.entries - llama.rows;
  const auto evicting = [llama, keep](uint32_t protect_first, uint32_t protect_last) {
    std::vector<HeadState> heads = runs(kLlama, keep, 0);
    for (HeadState& head : heads) {
      head.keep = keep;
      head.protect_first = protect_first;
      head.protect_last = protect_last;
    }
    Work w{.model = model_shape(), .max_rows = llama.rows, .step = {.n_rows = llama.rows}, .heads = heads};
    w.session = session_shape(heads, llama.rows, llama.entries);
    return w;
  };
  cases.push_back({"kv_compact 18432 -> 16384 entries", [&b, llama, keep, evicting](Operands& o) {
                     Work w = evicting(0, 0);
                     w.sets = b.sets(2 * kLlama.entry_bytes() * llama.entries);
                     const Layers l(o, llama, w.sets, true);
                     const View list = o.lists(kLlama.kv_heads, llama.entries, keep, 0, 0);
                     w.op = [=](Recorder& r, uint32_t set) {
                       r.record(KvCompact{list,
                                          {l.chunk_k},
                                          {l.chunk_v},
                                          l.chunk_pos,
                                          l.chunk_cis,
                                          {l.k[set]},
                                          {l.v[set]},
                                          l.pos[set],
                                          l.cis[set],
                                          {.heads = kLlama.kv_heads,
                                           .head_dim = kLlama.dh,
                                           .chunk_capacity = llama.rows,
                                           .list_capacity = keep + 1}});
                     };
                     // All but the few entries before the first evicted one are read and written: K, V,
                     // position, score.
                     w.bytes = 2.0 * keep * kLlama.kv_heads * (4.0 * kLlama.dh + 8);
                     return w;
                   }});
  cases.push_back({"top_k retain 18432 -> 16384 entries", [&b, llama, keep, evicting](Operands& o) {
                     const uint32_t list_capacity = 1 + llama.entries;
                     Work w = evicting(4, b.entries(2500));
                     const View scores = o.floats(uint64_t(kLlama.kv_heads) * keep),
                                chunk = o.floats(uint64_t(kLlama.kv_heads) * llama.rows),
                                list = o.bytes(uint64_t(kLlama.kv_heads) * list_capacity * 4);
                     w.op = [=](Recorder& r, uint32_t) {
                       r.record(TopK{scores,
                                     chunk,
                                     {},
                                     {},
                                     list,
                                     {.heads = kLlama.kv_heads,
                                      .keep = kKeepOfHead,
                                      .page = 1,
                                      .in_runs = 1,
                                      .chunk_capacity = llama.rows,
                                      .list_capacity = list_capacity}});
                     };
                     w.bytes = 4.0 * kLlama.kv_heads * (llama.entries + keep);
                     return w;
                   }});
  // The pages that an eviction leaves, and those of a token: the page of each head that contains it.
  constexpr uint32_t kPage = 16;
  const uint32_t entries = b.entries(131072) / kPage * kPage + kPage - 1;  // the last page is open
  for (const bool all : {true, false})
    cases.push_back({all ? "page_bounds 131072 entries, pages of 16" : "page_bounds 1 row, pages of 16",
                     [&b, entries, all](Operands& o) {
                       Work w{.model = model_shape(),
                              .step = {.n_rows = all ? 0u : 1u},
                              .heads = runs(kLlama, entries, 1),
                              .sets = b.sets(kLlama.entry_bytes() * entries)};
                       for (HeadState& head : w.heads) head.keep = entries;
                       w.session = session_shape(w.heads, 1, 64);
                       std::vector<View> k;
                       for (uint32_t i = 0; i < w.sets; ++i)
                         k.push_back(o.halves(uint64_t(layer_entries(w.heads)) * kLlama.dh));
                       const uint64_t pages = layer_entries(w.heads) / kPage + kLlama.kv_heads,
                                      bounds_bytes = 4u * kLlama.dh;
                       const View bounds = o.bytes(pages * bounds_bytes);
                       w.op = [=](Recorder& r, uint32_t set) {
                         r.record(PageBounds{
                             {k[set]},
                             bounds,
                             {.heads = kLlama.kv_heads, .head_dim = kLlama.dh, .page = kPage, .all = all}});
                       };
                       const double read = all ? entries : kPage, written = all ? double(entries) / kPage : 1;
                       w.bytes = kLlama.kv_heads *
                                 (read * 2 * kLlama.dh + written * static_cast<double>(bounds_bytes));
                       return w;
                     }});
}

// ---- writing: one row against the pool, with and without selection ----

struct Selecting {
  uint32_t n_init, select_k, n_local;
  uint32_t count() const { return n_init + select_k + n_local; }
};

// Layers of a model that selects: operands of all ops from the gate to attention.
struct Chain {
  Attending a;
  uint32_t n, sets, list_capacity, scope;
  std::vector<HeadState> heads;  // before the step
  std::vector<View> k, v, pos, gate, cached, list;
  View q, table, scores, lse, votes, y;
  DType k_type, v_type;

  // `entries`: of each head with the `rows` of the step, which are in the chunk buffer if there are several.
  // (One row is in the pool.)
  Chain(const Bench& b, Operands& o, const Attending& attending, const std::vector<uint32_t>& entries,
        uint32_t rows, uint32_t vote_scope, const Selecting& s, DType keys = DType::kF16,
        DType values = DType::kF16)
      : a(attending),
        n(*std::max_element(entries.begin(), entries.end())),
        list_capacity(1 + s.count()),
        scope(vote_scope),
        k_type(keys),
        v_type(values) {
    std::vector<uint32_t> before = entries;
    for (uint32_t& count : before) count -= rows;
    heads = runs(before, rows > 1 ? 0 : 1);
    const uint64_t held = layer_entries(heads);
    sets = b.sets(held * (kv_bytes(k_type, a.dh) + kv_bytes(v_type, a.dh)));
    // Blocks whose codes and scales are small.
    const auto rows_of = [&](DType type) {
      return type == DType::kF16 ? o.halves(held * a.dh)
                                 : o.of(std::vector<uint8_t>(held * kv_bytes(type, a.dh), 0x21));
    };
    for (uint32_t i = 0; i < sets; ++i) {
      k.push_back(rows_of(k_type));
      v.push_back(rows_of(v_type));
      pos.push_back(o.positions(heads));
      gate.push_back(o.of(std::vector<GateState>(1)));
      cached.push_back(o.bytes(a.width() * 4));
      list.push_back(o.lists(a.kv_heads, n, s.count(), s.n_init, s.n_local));
    }
    q = o.floats(uint64_t(rows) * a.width());
    table = o.rope(n, a.dh);
    scores = o.floats(uint64_t(a.heads()) * n, -8, 8);
    lse = o.of(std::vector<float>(a.heads(), 12.0f));
    votes = o.floats(uint64_t(a.kv_heads) * n, -12, 0);
    y = o.bytes(uint64_t(rows) * a.width() * 4);
  }
  Chain(const Bench& b, Operands& o, const Attending& attending, uint32_t entries, uint32_t rows,
        uint32_t vote_scope, const Selecting& s)
      : Chain(b, o, attending, std::vector<uint32_t>(attending.kv_heads, entries), rows, vote_scope, s) {}

  void query_gate(Recorder& r, uint32_t set) const {
    r.record(QueryGate{q, cached[set], gate[set], {.cols = a.width(), .heads = a.kv_heads}});
  }
  void token_score(Recorder& r, uint32_t set, const View& gated) const {
    r.record(TokenScore{q,
                        {k[set], k_type},
                        table,
                        gated,
                        scores,
                        lse,
                        {.heads = a.kv_heads,
                         .group = a.group,
                         .head_dim = a.dh,
                         .row_stride = a.width(),
                         .score_capacity = n,
                         .equal_heads = all_equal(heads),
                         .scale = 1,
                         .rope = rope_params(a)}});
  }
  void vote(Recorder& r, uint32_t set, const View& gated) const {
    r.record(Vote{scores,
                  lse,
                  pos[set],
                  gated,
                  votes,
                  {.heads = a.kv_heads,
                   .group = a.group,
                   .scope = scope,
                   .page = 1,
                   .score_capacity = n,
                   .vote_capacity = n}});
  }
  void top_k(Recorder& r, uint32_t set, const View& gated) const {
    r.record(TopK{votes,
                  {},
                  pos[set],
                  gated,
                  list[set],
                  {.heads = a.kv_heads,
                   .keep = kKeepOfStep,
                   .page = 1,
                   .by_position = scope == kVoteLayer,
                   .score_capacity = n,
                   .list_capacity = list_capacity}});
  }
  void attention(Recorder& r, uint32_t set, bool listed) const {
    r.record(Attention{q,
                       {k[set], k_type},
                       {v[set], v_type},
                       listed ? list[set] : View{},
                       table,
                       {},
                       y,
                       {},
                       attention_params(a, kFromPool, 0, list_capacity, all_equal(heads))});
  }

  // Entries of all heads with the step's row.
  double entries() const {
    double sum = 0;
    for (const HeadState& head : heads) sum += head.n_entries + 1;
    return sum;
  }
  double score_bytes() const { return entries() * (2.0 * a.dh + 4.0 * a.group); }
  double vote_bytes() const {
    return 4.0 * n * a.heads() + 4.0 * n * (scope == kVoteLayer ? 1 + a.kv_heads : a.kv_heads);
  }
  double top_k_bytes() const {
    return 4.0 * n * (scope == kVoteLayer ? 1 + a.kv_heads : a.kv_heads) + 4.0 * a.kv_heads * list_capacity;
  }
  double attention_bytes(uint32_t count) const { return 2.0 * static_cast<double>(a.entry_bytes()) * count; }
  double attention_bytes() const {
    return entries() * static_cast<double>(kv_bytes(k_type, a.dh) + kv_bytes(v_type, a.dh));
  }
};

void writing_cases(Bench& b, std::vector<Case>& cases) {
  const Selecting all{b.entries(128), b.entries(2048), b.entries(512)};
  // A case over a chain of one row against heads of so many entries; `make` gives it the op and what it
  // counts.
  const auto add_heads = [&](const std::string& name, const std::vector<uint32_t>& entries, uint32_t scope,
                             float theta, const std::function<void(Work&, const Chain&)>& make,
                             const Attending& a = kLlama, DType k = DType::kF16, DType v = DType::kF16) {
    // Nothing is selected from heads that hold fewer entries than that.
    const bool selects = *std::max_element(entries.begin(), entries.end()) >= all.count();
    const Selecting s = selects ? all : Selecting{0, 0, 1};
    cases.push_back({name, [&b, s, a, entries, scope, theta, make, k, v](Operands& o) {
                       const Chain chain(b, o, a, entries, 1, scope, s, k, v);
                       Work w{.model = model_shape(a),
                              .session = session_shape(chain.heads, 1, chain.n, chain.n),
                              .step = {.n_rows = 1,
                                       .position = static_cast<int32_t>(chain.n) - 1,
                                       .n_init = s.n_init,
                                       .n_local = s.n_local,
                                       .select_k = s.select_k,
                                       .theta = theta},
                              .heads = chain.heads,
                              .sets = chain.sets};
                       make(w, chain);
                       return w;
                     }});
  };
  const auto add = [&](const std::string& name, uint32_t entries, uint32_t scope, float theta,
                       const std::function<void(Work&, const Chain&)>& make) {
    add_heads(name, std::vector<uint32_t>(kLlama.kv_heads, b.entries(entries)), scope, theta, make);
  };
  const uint32_t count = all.count();
  add("attention 1 row, 131072 entries", 131072, kVoteLayer, 1, [](Work& w, const Chain& c) {
    w.op = [c](Recorder& r, uint32_t set) { c.attention(r, set, false); };
    w.bytes = c.attention_bytes();
  });
  for (const auto& [k, v] : {std::pair(DType::kQ8_0, DType::kQ8_0), std::pair(DType::kQ8_0, DType::kQ4_0),
                             std::pair(DType::kQ4_0, DType::kQ4_0), std::pair(DType::kF16, DType::kQ4_0)}) {
    const std::string of = std::string(", ") + dtype_info(k).name + ":" + dtype_info(v).name;
    for (const uint32_t n : {131072u, 512u})
      add_heads(
          "attention 1 row, " + std::to_string(n) + " entries" + of,
          std::vector<uint32_t>(kLlama.kv_heads, b.entries(n)), kVoteLayer, 1,
          [](Work& w, const Chain& c) {
            w.op = [c](Recorder& r, uint32_t set) { c.attention(r, set, false); };
            w.bytes = c.attention_bytes();
          },
          kLlama, k, v);
    add_heads(
        "token_score 1 row, 131072" + of, std::vector<uint32_t>(kLlama.kv_heads, b.entries(131072)),
        kVoteLayer, 1,
        [](Work& w, const Chain& c) {
          w.op = [c](Recorder& r, uint32_t set) { c.token_score(r, set, {}); };
          w.bytes = c.entries() * (static_cast<double>(kv_bytes(c.k_type, c.a.dh)) + 4.0 * c.a.group);
        },
        kLlama, k, v);
  }
  cases.push_back({"attention 1 row, 512 entries", [&b, n = b.entries(512)](Operands& o) {
                     const Chain c(b, o, kLlama, n, 1, kVoteGroup, {0, 0, 1});
                     Work w{.model = model_shape(),
                            .session = session_shape(c.heads, 1, n),
                            .step = {.n_rows = 1, .position = static_cast<int32_t>(n) - 1},
                            .heads = c.heads,
                            .sets = c.sets};
                     w.op = [c](Recorder& r, uint32_t set) { c.attention(r, set, false); };
                     w.bytes = c.attention_bytes();
                     return w;
                   }});
  // A head that kept far more than the others must cost what its entries do, and these nearly nothing.
  add_heads("attention 1 row, 16384 and 7 x 64 entries", one_long(b, 16384), kVoteGroup, 1,
            [](Work& w, const Chain& c) {
              w.op = [c](Recorder& r, uint32_t set) { c.attention(r, set, false); };
              w.bytes = c.attention_bytes();
            });
  add_heads("token_score 1 row, 16384 and 7 x 64", one_long(b, 16384), kVoteGroup, 1,
            [](Work& w, const Chain& c) {
              w.op = [c](Recorder& r, uint32_t set) { c.token_score(r, set, {}); };
              w.bytes = c.score_bytes();
            });
  for (const uint32_t n : {131072u, 16740u}) {
    const std::string of = std::to_string(n);
    const uint32_t scope = n == 131072 ? kVoteLayer : kVoteGroup;
    const std::string votes_by = scope == kVoteLayer ? ", layer" : ", group";
    add("attention 1 row, list of 2688 of " + of, n, scope, 1, [count](Work& w, const Chain& c) {
      w.op = [c](Recorder& r, uint32_t set) { c.attention(r, set, true); };
      w.bytes = c.attention_bytes(count);
    });
    add("token_score 1 row, " + of, n, scope, 1, [](Work& w, const Chain& c) {
      w.op = [c](Recorder& r, uint32_t set) { c.token_score(r, set, {}); };
      w.bytes = c.score_bytes();
    });
    add("vote " + of + votes_by, n, scope, 1, [](Work& w, const Chain& c) {
      w.op = [c](Recorder& r, uint32_t set) { c.vote(r, set, {}); };
      w.bytes = c.vote_bytes();
    });
    add("top_k select " + of + votes_by, n, scope, 1, [](Work& w, const Chain& c) {
      w.op = [c](Recorder& r, uint32_t set) { c.top_k(r, set, {}); };
      w.bytes = c.top_k_bytes();
    });

    // All ops of a selecting step. The first of the runs that warm up fills the cache, so later ones hit
    // under theta -1.
    const auto chain = [](const Chain& c, bool attends) {
      return [c, attends](Recorder& r, uint32_t set) {
        c.query_gate(r, set);
        c.token_score(r, set, c.gate[set]);
        c.vote(r, set, c.gate[set]);
        c.top_k(r, set, c.gate[set]);
        if (attends) c.attention(r, set, true);
      };
    };
    add("selection miss " + of + votes_by, n, scope, 1, [=](Work& w, const Chain& c) {
      w.op = chain(c, true);
      w.bytes = c.score_bytes() + c.vote_bytes() + c.top_k_bytes() + c.attention_bytes(count);
    });
    add("selection hit " + of + votes_by, n, scope, -1, [=](Work& w, const Chain& c) {
      w.op = chain(c, true);
      w.bytes = c.attention_bytes(count);
    });
    // The same program with one entry in the pool: nothing to select, and one key to attend to. What is left
    // is the price of launching these ops at their recorded sizes, below which no selection can be.
    add("selection empty " + of, n, scope, 1, [=](Work& w, const Chain& c) {
      w.op = chain(c, true);
      for (HeadState& head : w.heads) head.n_entries = 0;
      w.step.position = 0;
    });
  }
  // A layer's selection as such models make it: the ops one after the other, and some of them.
  const auto add_model = [&](const std::string& model, const Attending& a) {
    const uint32_t n = b.entries(32768);
    const auto add_ops = [&](const std::string& ops, bool scores, bool lists, bool attends) {
      add_heads(
          "select 32768 " + model + ", " + ops, std::vector<uint32_t>(a.kv_heads, n), kVoteLayer, 1,
          [=](Work& w, const Chain& c) {
            w.op = [=](Recorder& r, uint32_t set) {
              if (scores) c.token_score(r, set, {});
              if (lists) c.vote(r, set, {});
              if (lists) c.top_k(r, set, {});
              if (attends) c.attention(r, set, true);
            };
            if (scores) w.bytes += c.score_bytes();
            if (lists) w.bytes += c.vote_bytes() + c.top_k_bytes();
            if (attends) w.bytes += c.attention_bytes(count);
          },
          a);
    };
    add_ops("token_score", true, false, false);
    add_ops("token_score to top_k", true, true, false);
    add_ops("token_score to attention", true, true, true);
    add_ops("attention", false, false, true);
  };
  add_model("qwen3", kQwen3Heads);
  add_model("gpt-oss", kGptOssHeads);
  add("query_gate", 16740, kVoteGroup, 1, [](Work& w, const Chain& c) {
    w.op = [c](Recorder& r, uint32_t set) { c.query_gate(r, set); };
    w.bytes = 12.0 * c.a.width();  // q and the cached query read, the cached query written
  });
  cases.push_back({"page_score 1 row, 131072, pages of 16", [&b](Operands& o) {
                     constexpr uint32_t kPage = 16;
                     const uint32_t n = b.entries(131072), pages = static_cast<uint32_t>(ceil_div(n, kPage));
                     Work w{.model = model_shape(),
                            .step = {.n_rows = 1, .position = static_cast<int32_t>(n) - 1, .n_local = 1},
                            .heads = runs(kLlama, n - 1, 1)};
                     w.session = session_shape(w.heads, 1, 64, n);
                     const uint64_t of_layer =
                         (layer_entries(w.heads) / kPage + kLlama.kv_heads) * 2 * kLlama.dh;
                     w.sets = b.sets(of_layer * 2);
                     std::vector<View> bounds;
                     for (uint32_t i = 0; i < w.sets; ++i) bounds.push_back(o.halves(of_layer));
                     const View q = o.floats(kLlama.width()), table = o.rope(n, kLlama.dh),
                                scores = o.bytes(uint64_t(kLlama.heads()) * pages * 4),
                                lse = o.bytes(kLlama.heads() * 4);
                     RopeParams rope = rope_params(kLlama);
                     rope.mode = kRopeOriginal;
                     w.op = [=](Recorder& r, uint32_t set) {
                       r.record(PageScore{q,
                                          bounds[set],
                                          table,
                                          scores,
                                          lse,
                                          {.heads = kLlama.kv_heads,
                                           .group = kLlama.group,
                                           .head_dim = kLlama.dh,
                                           .row_stride = kLlama.width(),
                                           .page = kPage,
                                           .score_capacity = pages,
                                           .scale = 0.0883883f,
                                           .rope = rope}});
                     };
                     w.bytes = 4.0 * pages * (kLlama.kv_heads * kLlama.dh + kLlama.heads());
                     return w;
                   }});
}

// ---- reading a long text: 512 queries against 1,048,576 cached tokens ----

constexpr const char *kPrefillSelecting = "prefill 512 rows, 1048576 cached, selecting",
                     *kPrefillDense = "prefill 512 rows, 1048576 cached, dense";

Work long_prefill(const Bench& b, Operands& o, bool selecting) {
  const Selecting s{b.entries(128), b.entries(2048), b.entries(512)};
  const uint32_t rows = b.rows(512), cached = b.entries(1u << 20), n = cached + rows;
  const uint32_t view = selecting ? s.count() : b.entries(32768),
                 passes = static_cast<uint32_t>(ceil_div(n, view));
  const Chain c(b, o, kQwen, n, rows, kVoteLayer, s);
  const Chunk chunk{kQwen, rows, n};
  const View chunk_k = o.halves(uint64_t(kQwen.kv_heads) * rows * kQwen.dh),
             chunk_v = o.halves(uint64_t(kQwen.kv_heads) * rows * kQwen.dh),
             view_k = o.bytes(uint64_t(kQwen.kv_heads) * view * kQwen.dh * b.view_element_bytes()),
             view_v = o.bytes(uint64_t(kQwen.kv_heads) * view * kQwen.dh * b.view_element_bytes()),
             ml = o.bytes(uint64_t(rows) * kQwen.heads() * 8);
  Work w{.model = model_shape(kQwen),
         .session = session_shape(c.heads, rows, view, n),
         .max_rows = rows,
         .step = {.n_rows = rows,
                  .position = static_cast<int32_t>(cached),
                  .n_init = s.n_init,
                  .n_local = s.n_local,
                  .select_k = s.select_k,
                  .theta = 1},
         .heads = c.heads,
         .sets = c.sets};
  w.op = [=](Recorder& r, uint32_t set) {
    const View list = selecting ? c.list[set] : View{};
    if (selecting) {
      c.token_score(r, set, {});
      c.vote(r, set, {});
      c.top_k(r, set, {});
    }
    KvViewParams shown = view_params(chunk, view, c.list_capacity);
    AttentionParams p = attention_params(kQwen, kFromView, view, c.list_capacity);
    for (uint32_t pass = 0; pass < (selecting ? 1 : passes); ++pass) {
      shown.first_entry = p.first_entry = pass * view;
      r.record(KvView{{c.k[set]}, {c.v[set]}, {chunk_k}, {chunk_v}, list, c.table, view_k, view_v, shown});
      r.record(Attention{c.q, {view_k}, {view_v}, list, c.table, {}, c.y, ml, p});
    }
  };
  if (selecting)
    w.bytes = c.score_bytes() + c.vote_bytes() + c.top_k_bytes();
  else
    w.flop = attention_flop(chunk);
  return w;
}

// ---- latent attention: the heads of GLM-4.7-Flash and Moonlight ----

struct Latent {
  uint32_t heads, query_dim, value_dim;
  static constexpr uint32_t kRotated = 64, kLatent = 512, kDim = kRotated + kLatent;
  Attending attending() const { return {1, heads, kDim}; }
};

AttentionParams latent_params(const Latent& m, uint32_t source, uint32_t view_capacity) {
  AttentionParams p = attention_params(m.attending(), source, view_capacity, 0);
  p.y_stride = m.heads * Latent::kLatent;
  p.rope = {.mode = kRopeList, .pairing = kRopeAdjacent, .n_rot = Latent::kRotated};
  return p;
}

// A single row against the pool, or several rows against the view.
Work latent_attention(const Bench& b, Operands& o, const Latent& m, uint32_t rows, uint32_t entries) {
  const Attending a = m.attending();
  const bool pooled = rows == 1;
  Work w{.model = model_shape(a),
         .max_rows = rows,
         .step = {.n_rows = rows, .position = static_cast<int32_t>(entries - rows)},
         .heads = runs(a, entries - rows, pooled ? 1 : 0)};
  w.session = session_shape(w.heads, rows, entries);
  w.sets = pooled ? b.sets(a.entry_bytes() * entries) : 1;
  std::vector<View> k;
  for (uint32_t i = 0; i < w.sets; ++i) k.push_back(o.halves(uint64_t(entries) * a.dh));
  const View q = o.floats(uint64_t(rows) * a.width()),
             y = o.bytes(uint64_t(rows) * m.heads * Latent::kLatent * 4),
             ml = o.bytes(uint64_t(rows) * m.heads * 8), table = o.rope(entries, Latent::kRotated);
  const AttentionParams p = latent_params(m, pooled ? kFromPool : kFromView, entries);
  w.op = [=](Recorder& r, uint32_t set) { r.record(Attention{q, {k[set]}, {}, {}, table, {}, y, ml, p}); };
  if (pooled)
    w.bytes = static_cast<double>(a.entry_bytes() * entries);
  else
    w.flop = attention_flop({a, rows, entries}) * (Latent::kDim + Latent::kLatent) / (2.0 * Latent::kDim);
  return w;
}

// Queries to the latent channels, or what heads attended to from there to their values.
Work latent_heads(const Bench& b, Operands& o, const Latent& m, uint32_t rows, DType type, bool of_values) {
  const uint32_t in = of_values ? Latent::kLatent : m.query_dim - Latent::kRotated,
                 out = of_values ? m.value_dim : Latent::kLatent, copied = of_values ? 0 : Latent::kRotated;
  const uint64_t weight_bytes = dtype_bytes(type, uint64_t(m.heads) * out * in);
  Work w{.model = model_shape(m.attending()),
         .session = {.chunk = rows, .view_capacity = 64},
         .max_rows = rows,
         .step = {.n_rows = rows},
         .sets = b.sets(weight_bytes)};
  std::vector<Weight> weights;
  for (uint32_t i = 0; i < w.sets; ++i) weights.push_back(o.weight(type, m.heads * out, in));
  const HeadLinearParams p{.heads = m.heads,
                           .in_cols = in,
                           .out_cols = out,
                           .copied = copied,
                           .x_stride = m.heads * (in + copied),
                           .x_head_stride = in + copied,
                           .y_stride = m.heads * (copied + out),
                           .y_head_stride = copied + out,
                           .w_first = 0,
                           .w_head_rows = out,
                           .transposed = 0};
  const View x = o.floats(uint64_t(rows) * p.x_stride), y = o.bytes(uint64_t(rows) * p.y_stride * 4);
  w.op = [=](Recorder& r, uint32_t set) { r.record(HeadLinear{x, weights[set], y, p}); };
  w.bytes = static_cast<double>(weight_bytes) + 4.0 * rows * (p.x_stride + p.y_stride);
  w.flop = 2.0 * rows * m.heads * in * out;
  return w;
}

void latent_cases(Bench& b, std::vector<Case>& cases) {
  constexpr Latent kGlm{20, 256, 256}, kMoonlight{16, 192, 128};
  const auto add_attention = [&](const std::string& name, const Latent& m, uint32_t rows, uint32_t entries) {
    cases.push_back({"latent attention " + std::to_string(rows) + (rows == 1 ? " row, " : " rows, ") +
                         std::to_string(entries) + " entries, " + name,
                     [&b, m, rows, entries](Operands& o) {
                       return latent_attention(b, o, m, b.rows(rows), b.entries(entries));
                     }});
  };
  for (const uint32_t entries : {4096u, 16384u, 65536u, 131072u}) add_attention("glm", kGlm, 1, entries);
  add_attention("moonlight", kMoonlight, 1, 65536);
  for (const uint32_t rows : {64u, 512u, 2048u}) add_attention("glm", kGlm, rows, 16384);
  add_attention("moonlight", kMoonlight, 2048, 16384);
  for (const uint32_t rows : {1u, 8u, 64u, 1024u})
    for (const bool of_values : {false, true})
      cases.push_back({std::string("head_linear ") + std::to_string(rows) +
                           (of_values ? " rows, values, q4_K" : " rows, keys, q8_0"),
                       [&b, rows, of_values, kGlm](Operands& o) {
                         return latent_heads(b, o, kGlm, b.rows(rows),
                                             of_values ? DType::kQ4_K : DType::kQ8_0, of_values);
                       }});
}

int usage() {
  std::fprintf(stderr, "usage: ops_bench DEVICE [--small] [--json] [CASE...]\n");
  return 2;
}

int run(int count, char** words) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--json")
      options.json = true;
    else if (word == "--small")
      options.small = true;
    else if (word.starts_with("--"))
      return usage();
    else if (options.device.empty())
      options.device = word;
    else
      options.words.push_back(word);
  }
  if (options.device.empty()) return usage();
  Bench bench(options);
  if (const Status status = bench.open(); !status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  std::vector<Case> cases;
  dense_cases(bench, cases);
  convolution_cases(bench, cases);
  delta_cases(bench, cases);
  delta_layer_cases(bench, cases);
  ssm_cases(bench, cases);
  mixture_cases(bench, cases);
  reading_cases(bench, cases);
  writing_cases(bench, cases);
  latent_cases(bench, cases);
  cases.push_back({kPrefillSelecting, [&](Operands& o) { return long_prefill(bench, o, true); }});
  cases.push_back({kPrefillDense, [&](Operands& o) { return long_prefill(bench, o, false); }});
  bool all_ran = true;
  for (const Case& c : cases) all_ran = bench.run(c) && all_ran;
  const double dense = bench.microseconds(kPrefillDense), selecting = bench.microseconds(kPrefillSelecting);
  if (dense > 0 && selecting > 0 && bench.json())
    std::printf("{\"case\":\"prefill, dense over selecting\",\"ratio\":%.3f}\n", dense / selecting);
  else if (dense > 0 && selecting > 0)
    std::printf("\nprefill: selecting %.2f ms, dense %.2f ms, %.1f times as long\n", selecting / 1e3,
                dense / 1e3, dense / selecting);
  return all_ran ? 0 : 1;
}

}  // namespace
}  // namespace thimble

int main(int count, char** words) { return thimble::run(count, words); }
