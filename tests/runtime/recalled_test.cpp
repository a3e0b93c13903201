// Tests the store of evicted entries and what comes back from it, on whole sessions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <numeric>

#include "backends/cpu/host/cpu_device.h"
#include "backends/cpu/kernels.h"
#include "runtime/plan/lay_out.h"
#include "tests/support/device_test_name.h"
#include "tests/support/goldens.h"
#include "tests/support/reference_model.h"
#include "tests/support/saved_sessions.h"
#include "tests/support/seeded_model.h"
#include "tests/support/sessions.h"
#include "tests/support/shared_devices.h"
#include "tests/support/spy_device.h"
#include "tests/support/synthetic_model.h"
#include "tests/support/vulkan_messages.h"

namespace thimble::test {
namespace {

// A window of 64 entries, and a store for all others, which come back as they were.
SessionOptions with_store(uint32_t recall) {
  SessionOptions o{.retention = Retention::kWindow,
                   .pool = 64,
                   .chunk = 32,
                   .stabilizers = 8,
                   .local = 24,
                   .protect_init = 4,
                   .max_new = 40};
  o.recall_mem = 4 << 20;
  o.recall = recall;
  o.recall_every = 8;
  o.recall_format = KvFormat::kF16;
  return o;
}

float largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

std::vector<int32_t> all_positions(int32_t n) {
  std::vector<int32_t> all(static_cast<size_t>(n));
  for (int32_t i = 0; i < n; ++i) all[static_cast<size_t>(i)] = i;
  return all;
}

std::vector<int32_t> generate(Session& session, int tokens) {
  std::vector<int32_t> all;
  for (int i = 0; i < tokens; ++i) all.push_back(must(session.step()));
  return all;
}

std::vector<std::string> device_names() {
  std::vector<std::string> names;
  for (const DeviceInfo& info : list_devices())
    if (info.usable) names.push_back(info.name);
  return names;
}

class RecalledOn : public ::testing::TestWithParam<std::string> {
 protected:
  static bool on_cpu() { return GetParam() == "cpu"; }
  static std::shared_ptr<Device> device() {
    return shared_device(GetParam(), [] { return must(open_device(GetParam(), strictly({.threads = 2}))); });
  }
  // The same numbers are summed in another order: a few roundings of f32. Devices with f16 products read the
  // last tokens in other products than chunks: as in device_test, 2^-6 of the largest logit.
  static float tolerance(const std::vector<float>& expected) {
    const float largest = std::abs(*std::max_element(
        expected.begin(), expected.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
    return on_cpu() ? 1e-4f : largest * 0x1p-6f;
  }
  static bool is_slow() { return device()->info().software; }
  static std::unique_ptr<Session> open(const std::shared_ptr<const Model>& model, const SessionOptions& o) {
    return open_session(model, o, device());
  }
};
INSTANTIATE_TEST_SUITE_P(Device, RecalledOn, ::testing::ValuesIn(device_names()), device_test_name);

TEST_P(RecalledOn, BringsEvictedEntriesBackToTheirPlaces) {
  const auto session = open(seeded_model().model, with_store(512));
  const std::vector<int32_t> text = seeded_tokens(300);
  must(session->feed(text));
  EXPECT_LT(kept(*session)[0][0].size(), 150u);
  must(session->flush());
  for (const auto& layer : kept(*session))
    for (const auto& head : layer) EXPECT_EQ(head, all_positions(300));
  for (const uint32_t recalled : session->state().recalled) EXPECT_GT(recalled, 150u);
}

TEST_P(RecalledOn, LeavesAPlanThatIsKept) {
  const SeededModel m = seeded_model();
  const auto counting = std::make_shared<SpyDevice>(device());
  const auto session = open_session(m.model, with_store(64), counting);
  read(*session, seeded_tokens(400));
  const MemoryPlan& plan = session->plan();
  // A device that votes reads the store, which is not in the total.
  const uint64_t read = plan.host_votes ? 0 : RecallStore::memory_bytes(recall_shape(*m.model, plan.options));
  EXPECT_EQ(counting->allocated_bytes - read + plan.fixed + host_bytes(*m.model, plan), plan.total);
  EXPECT_EQ(session->store_bytes(), plan.store);
  EXPECT_LE(plan.store, plan.options.recall_mem);
  EXPECT_LE(session->allocated(), plan.total);
  for (size_t i = 0; i < session->runs().size(); ++i) {
    EXPECT_LE(session->state().recalled[i], 64u);
    EXPECT_GT(session->state().recalled[i], 48u);
    EXPECT_LE(session->state().entries[i], session->runs()[i].capacity);
  }
}

// In a model of one layer, keys and values do not depend on what earlier tokens attended to, so the last
// token of the prompt, which reads all entries, sees the same as with dense attention.
TEST_P(RecalledOn, AllEntriesMakeAttentionDense) {
  Seeded one;
  one.layers = 1;
  for (const Positions positions : {Positions::kList, Positions::kOriginal}) {
    const SeededModel m = seeded_model(one);
    SessionOptions o = with_store(512);
    o.positions = positions;
    const std::vector<int32_t> text = seeded_tokens(300);
    const auto dense = open(m.model, {.pool = 1000, .chunk = 32, .positions = positions});
    const auto session = open(m.model, o);
    const std::vector<float> expected = read(*dense, text), logits = read(*session, text);
    EXPECT_LT(largest_difference(expected, logits), tolerance(expected));
    SessionOptions without = o;
    without.recall_mem = without.recall = 0;
    EXPECT_GT(largest_difference(expected, read(*open(m.model, without), text)), 1e-2f);
  }
}

// What a shrinking pool evicts comes back bit for bit, so the session continues as one that did not shrink.
// The store has entries of a quantised pool as they are there.
TEST(Recalled, ComesBackBitForBit) {
  Seeded wide;
  wide.head_dim = 32;
  const SeededModel m = seeded_model(wide);
  struct {
    KvFormat k, v;
  } const formats[] = {{KvFormat::kF16, KvFormat::kF16},
                       {KvFormat::kQ8_0, KvFormat::kQ8_0},
                       {KvFormat::kQ4_0, KvFormat::kF16},
                       {KvFormat::kF16, KvFormat::kQ4_0}};
  for (const auto& format : formats) {
    SessionOptions large = with_store(512);
    large.pool = 300;
    large.key_format = format.k;
    large.value_format = format.v;
    const auto dense =
        open_session(m.model, {.pool = 1000, .chunk = 32, .key_format = format.k, .value_format = format.v});
    const auto session = open_session(m.model, large);
    read(*dense, seeded_tokens(280));
    read(*session, seeded_tokens(280));
    EXPECT_EQ(session->state().evicted, 0u);
    must(session->shrink(64));
    EXPECT_EQ(kept(*session)[0][0].size(), 64u);
    EXPECT_EQ(accept(*dense, 5), accept(*session, 5));
    EXPECT_EQ(kept(*session)[0][0], all_positions(281));
    EXPECT_EQ(generate(*dense, 30), generate(*session, 30));
    EXPECT_EQ(kept(*session)[1][1], all_positions(311));
  }
}

// Every token of a question attends to what the question calls back, not just its last one. The states of
// recurrent layers see the question once.
void expect_whole_questions(const std::shared_ptr<const Model>& model) {
  SessionOptions large = with_store(512);
  large.pool = 300;
  const auto dense = open_session(model, {.pool = 1000, .chunk = 32});
  const auto session = open_session(model, large);
  read(*dense, seeded_tokens(280));
  read(*session, seeded_tokens(280));
  must(session->shrink(64));
  const std::vector<int32_t> question = seeded_tokens(20, 64, 3);
  EXPECT_EQ(read(*dense, question), read(*session, question));
  EXPECT_EQ(must(session->stats()).prefill_tokens, 300u);  // counted once
}

TEST(Recalled, WholeQuestionsSeeWhatTheyCallBack) { expect_whole_questions(seeded_model().model); }

TEST(Recalled, WholeQuestionsPassStatesOnce) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const char* family : {"lfm2", "qwen35", "falconh1"}) {
    SCOPED_TRACE(family);
    expect_whole_questions(family_model(family, "recalled"));
  }
}

TEST_P(RecalledOn, WorksWithStates) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  for (const char* family : {"lfm2", "qwen35", "falconh1"}) {
    if (is_slow() && family != std::string_view("lfm2")) continue;
    SCOPED_TRACE(family);
    const std::shared_ptr<const Model> model = family_model(family, "recalled");
    const SessionOptions o = with_store(48);
    const auto session = open(model, o), copy = open(model, o);
    must(session->set_sampler(kWarm));
    read(*session, seeded_tokens(260));
    generate(*session, 5);
    EXPECT_GT(*std::max_element(session->state().recalled.begin(), session->state().recalled.end()), 0u);
    restore(*copy, save(*session));
    EXPECT_EQ(go_on(*copy), go_on(*session));
  }
}

// Entries that the store has with fewer bits come back nearly as they were.
TEST(Recalled, ComesBackNearlyFromFewerBits) {
  Seeded wide;
  wide.head_dim = 32;
  wide.layers = 1;
  const SeededModel m = seeded_model(wide);
  const std::vector<int32_t> text = seeded_tokens(300);
  const std::vector<float> expected = read(*open_session(m.model, {.pool = 1000, .chunk = 32}), text);
  std::vector<float> differences;
  uint64_t bytes = UINT64_MAX;
  for (const KvFormat format : {KvFormat::kF16, KvFormat::kQ8_0, KvFormat::kQ4_0}) {
    SessionOptions o = with_store(512);
    o.recall_format = format;
    const auto session = open_session(m.model, o);
    differences.push_back(largest_difference(expected, read(*session, text)));
    EXPECT_GT(session->plan().store_pages, 0u);
    o.recall_mem = 1 << 20;
    const uint64_t page = (1 << 20) / must(make_plan(*m.model, *cpu(), o)).store_pages;
    EXPECT_LT(page, bytes);
    bytes = page;
  }
  EXPECT_LT(differences[0], 1e-4f);
  EXPECT_GT(differences[1], differences[0]);
  EXPECT_GT(differences[2], 4 * differences[1]);  // a code has 4 bits less, so a step is 17 times as long
  SessionOptions without = with_store(512);
  without.recall_mem = without.recall = 0;
  EXPECT_LT(differences[2], largest_difference(expected, read(*open_session(m.model, without), text)) / 2);
}

TEST_P(RecalledOn, CopiesAndFilesContinueAlike) {
  for (const Retention retention :
       {Retention::kWindow, Retention::kRandom, Retention::kKeyDiff, Retention::kTova, Retention::kReread}) {
    SCOPED_TRACE(policy_name(retention));
    SessionOptions o = with_store(48);
    o.retention = retention;
    const auto session = open(seeded_model().model, o);
    must(session->set_sampler(kWarm));
    read(*session, seeded_tokens(260));
    generate(*session, 5);
    EXPECT_GT(session->state().recalled[0], 0u);
    const auto twin = must(session->clone());
    const auto copy = open(seeded_model().model, o);
    restore(*copy, save(*session));
    EXPECT_EQ(copy->state().recalled, session->state().recalled);
    const Outcome expected = go_on(*session);
    EXPECT_EQ(go_on(*twin), expected);
    EXPECT_EQ(go_on(*copy), expected);
    if (HasFailure()) return;
  }
}

// Scoring a text gives the log-probabilities of single steps, and keeps the same entries.
void expect_scores_as_steps_do(const SessionOptions& o) {
  const auto session = open_session(seeded_model().model, o), steps = open_session(seeded_model().model, o);
  const std::vector<int32_t> text = seeded_tokens(260), more = seeded_tokens(40, 64, 8);
  std::vector<float> log_probs(more.size());
  read(*session, text);
  must(session->score(more, log_probs));
  std::vector<float> logits = read(*steps, text);
  for (size_t i = 0; i < more.size(); ++i) {
    double sum = 0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    EXPECT_NEAR(log_probs[i], logits[static_cast<size_t>(more[i])] - std::log(sum), 1e-3);
    logits = accept(*steps, more[i]);
  }
  EXPECT_EQ(kept(*session), kept(*steps));
}

// ---- everything is recalled ----

SessionOptions with_all() {
  SessionOptions o = with_store(kRecallAll);
  o.recall_every = 0;
  return o;
}

// In a model of one layer, as above: with a store of everything else, the last token of the prompt and all
// generated ones see the same as with dense attention. The runs hold no more entries than without a store.
TEST_P(RecalledOn, AttentionToEverythingIsDense) {
  Seeded one;
  one.layers = 1;
  for (const Positions positions : {Positions::kList, Positions::kOriginal})
    for (const bool grows : {false, true}) {
      const SeededModel m = seeded_model(grows ? growing(one) : one);
      SessionOptions o = with_all();
      o.positions = positions;
      if (grows) std::swap(o.recall_mem, o.recall_disk);
      const std::vector<int32_t> text = seeded_tokens(300);
      const auto dense = open(m.model, {.pool = 1000, .chunk = 32, .positions = positions});
      const auto session = open(m.model, o);
      std::vector<float> expected = read(*dense, text), logits = read(*session, text);
      for (int32_t i = 0; i < (is_slow() ? 20 : 50); ++i) {  // the pool may be full again before the end
        ASSERT_LT(largest_difference(expected, logits), tolerance(expected)) << "after " << i << " tokens";
        expected = accept(*dense, i);
        logits = accept(*session, i);
      }
      EXPECT_EQ(must(session->stats()).recalled, 0u);
      EXPECT_LT(kept(*session)[0][0].size(), 130u);
      SessionOptions without = o;
      without.recall_mem = without.recall_disk = without.recall = 0;
      EXPECT_GT(largest_difference(expected, read(*open(m.model, without), text)), 1e-2f);
    }
}

// If the text is also read with the store, nothing is lost in a model of several layers either. Sums in
// another order move few numbers of the later layers to the next one in f16.
TEST(RecalledAll, ReadingIsDenseToo) {
  const std::vector<int32_t> text = seeded_tokens(300);
  for (const Retention retention : {Retention::kWindow, Retention::kKeyDiff, Retention::kRandom})
    for (const bool in_file : {false, true}) {
      const SeededModel m = seeded_model();
      SessionOptions o = with_all();
      o.retention = retention;
      if (in_file) std::swap(o.recall_mem, o.recall_disk);
      const std::vector<float> expected = read(*open_session(m.model, {.pool = 1000, .chunk = 32}), text);
      EXPECT_GT(largest_difference(expected, read(*open_session(m.model, o), text)), 1e-2f);
      o.recall_prefill = true;
      EXPECT_LT(largest_difference(expected, read(*open_session(m.model, o), text)), 1e-4f);
    }
}

// Of a store in a file, each layer's rows are read before its attention, so a token has a segment for each
// layer. GPUs then compute norms in other launches, with other roundings; the CPU has the same bits.
TEST_P(RecalledOn, AFileOfEverythingGivesTheSame) {
  Seeded wide;
  wide.head_dim = 32;
  for (const KvFormat format : {KvFormat::kF16, KvFormat::kQ8_0}) {
    if (is_slow() && format != KvFormat::kF16) continue;
    SessionOptions o = with_all();
    o.recall_format = format;
    const auto in_memory = open(seeded_model(wide).model, o);
    std::swap(o.recall_mem, o.recall_disk);
    const auto in_file = open(seeded_model(wide).model, o);
    EXPECT_GT(in_file->plan().store_file, 0u);
    EXPECT_EQ(read(*in_memory, seeded_tokens(300)), read(*in_file, seeded_tokens(300)));
    for (int32_t i = 0; i < 50; ++i) {
      const std::vector<float> expected = accept(*in_memory, i), got = accept(*in_file, i);
      ASSERT_LE(largest_difference(expected, got), on_cpu() ? 0 : tolerance(expected));
    }
  }
}

// A file that was changed is one clear error. The step begins anew without the store.
TEST(RecalledAll, AFileThatFailsEndsTheStore) {
  Seeded one;
  one.layers = 1;
  SessionOptions o = with_all();
  std::swap(o.recall_mem, o.recall_disk);
  const auto session = open_session(seeded_model(one).model, o);
  read(*session, seeded_tokens(260));
  RecallStore& store = *session->store();
  const std::vector<std::byte> zeros(store.file_end());
  must(store.file()->write(0, zeros.data(), zeros.size()));
  const Status failed = session->accept(3);
  EXPECT_EQ(failed.code(), Code::kIo);
  EXPECT_EQ(failed.message(),
            "the temporary file of evicted entries was changed; the session goes on without its store of "
            "evicted entries");
  EXPECT_EQ(must(session->stats()).stored, 0u);
  must(session->accept(3));
  o.recall_disk = o.recall = 0;
  const auto without = open_session(seeded_model(one).model, o);
  read(*without, seeded_tokens(260));
  must(without->accept(3));
  // Keys and values of one layer do not depend on what was attended to.
  for (int32_t i = 0; i < 50; ++i) {
    const std::vector<float> expected = accept(*without, i), got = accept(*session, i);
    // The same numbers are summed in another order.
    ASSERT_LT(largest_difference(expected, got), 1e-4f);
  }
}

// Models of all architectures read the first part of a text with dense attention. Then all but a few entries
// leave the pool, and the rest of the text and what is generated attends to the store: the logits are those
// that numpy computed with dense attention.
TEST(RecalledAll, GivesTheGoldensOfAllArchitectures) {
  using Top = std::vector<std::pair<size_t, float>>;
  uint32_t compared = 0;
  for (const nlohmann::json& golden : load_json(project_file("tests/reference/models.json"))) {
    const std::string name = golden.at("model");
    SCOPED_TRACE(name);
    const auto model =
        must(Model::open(must(MappedFile::open(project_file("tests/reference/" + name))), name));
    const auto prompt = golden.at("prompt").get<std::vector<int32_t>>();
    SessionOptions o{.retention = Retention::kWindow,
                     .pool = 192,
                     .chunk = 32,
                     .local = 24,
                     .max_new = 32,
                     .context = golden.at("context")};
    o.recall_mem = 8 << 20;
    o.recall = kRecallAll;
    auto made = Session::create(model, cpu(), o);
    if (!made.ok()) {  // latent attention, or nothing to evict
      EXPECT_EQ(made.status().code(), Code::kUnsupported) << made.status().message();
      continue;
    }
    const std::unique_ptr<Session> session = std::move(*made);
    const size_t last = 11;
    ASSERT_GT(prompt.size(), last + 20);
    read(*session, std::span(prompt).first(prompt.size() - last));
    must(session->shrink(8));
    const std::vector<float> logits = read(*session, std::span(prompt).last(last));
    EXPECT_GT(must(session->stats()).stored, 0u);
    const float tolerance = golden.at("tolerance");
    for (const auto& [token, logit] : golden.at("top").get<Top>())
      EXPECT_NEAR(logits.at(token), logit, tolerance) << "token " << token;
    const auto greedy = golden.at("greedy").get<std::vector<int32_t>>();
    for (size_t i = 0; i < greedy.size(); ++i) EXPECT_EQ(must(session->step()), greedy[i]);
    ++compared;
  }
  EXPECT_GT(compared, 20u);
}

TEST_P(RecalledOn, CopiesAndFilesOfEverythingContinueAlike) {
  for (const Retention retention :
       {Retention::kWindow, Retention::kRandom, Retention::kKeyDiff, Retention::kTova, Retention::kReread}) {
    SCOPED_TRACE(policy_name(retention));
    if (is_slow() && retention != Retention::kWindow) continue;
    SessionOptions o = with_all();
    o.retention = retention;
    const auto session = open(seeded_model().model, o);
    must(session->set_sampler(kWarm));
    read(*session, seeded_tokens(260));
    generate(*session, 5);
    const auto twin = must(session->clone());
    const auto copy = open(seeded_model().model, o);
    restore(*copy, save(*session));
    const Outcome expected = go_on(*session);
    EXPECT_EQ(go_on(*twin), expected);
    EXPECT_EQ(go_on(*copy), expected);
    if (HasFailure()) return;
  }
}

// The store keeps what a rewind goes back over, because this is never older than the latest eviction.
TEST(RecalledAll, RewindsAsFarAsWithoutAStore) {
  const auto session = open_session(seeded_model().model, with_all());
  read(*session, seeded_tokens(260));
  const uint64_t earliest = session->state().last_eviction;
  std::vector<std::vector<float>> answers;
  for (int32_t i = 0; i < 6; ++i) answers.push_back(accept(*session, i));
  must(session->rewind(260));
  for (int32_t i = 0; i < 6; ++i) EXPECT_EQ(accept(*session, i), answers[static_cast<size_t>(i)]);
  EXPECT_EQ(session->rewind(earliest - 1).code(), Code::kCannotRewind);
  must(session->reset());
  EXPECT_EQ(must(session->stats()).stored, 0u);
}

// An interrupt after every part, of which a chunk's attention has several, and the same result.
TEST(RecalledAll, InterruptsChangeNothing) {
  const auto session = open_session(seeded_model().model, with_all());
  const auto device =
      std::make_shared<SpyDevice>(must(open_cpu_device(1, 500e3 / cpu::kernels().flop_per_second)));
  const auto stopped = open_session(seeded_model().model, with_all(), device);
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    stopped->interrupt();
  };
  const std::vector<int32_t> text = seeded_tokens(260);
  must(session->feed(text));
  int interrupts = insist([&] { return stopped->feed(text); });
  interrupts += insist([&] { return stopped->flush(); });
  EXPECT_GT(interrupts, 20);
  const std::span<const float> logits = must(stopped->logits());
  EXPECT_EQ(flush(*session), std::vector<float>(logits.begin(), logits.end()));
  for (int i = 0; i < 60; ++i) {
    const int32_t token = must(session->step());
    insist([&]() -> Status {
      THIMBLE_LET(mine, stopped->step());
      EXPECT_EQ(mine, token);
      return {};
    });
  }
  EXPECT_EQ(kept(*session), kept(*stopped));
}

TEST(RecalledAll, ScoresATextAsStepsDo) { expect_scores_as_steps_do(with_all()); }

// What a plan says of the bytes that a token reads is what the session counts.
TEST(RecalledAll, CountsWhatItReads) {
  SessionOptions o = with_all();
  o.recall_mem = 48 << 10;
  const auto session = open_session(seeded_model().model, o);
  const SessionOptions without{.retention = o.retention,
                               .pool = o.pool,
                               .chunk = o.chunk,
                               .stabilizers = o.stabilizers,
                               .local = o.local,
                               .protect_init = o.protect_init,
                               .max_new = o.max_new};
  const auto plain = open_session(seeded_model().model, without);
  for (Session* s : {session.get(), plain.get()}) {
    read(*s, seeded_tokens(900));
    accept(*s, 1);
  }
  const MemoryPlan& plan = session->plan();
  EXPECT_LT(plan.store_pages * kRecallPage, 700u);  // so the store is full
  // Two layers of two heads of 8 channels, keys and values in two bytes each.
  const uint64_t entry = uint64_t{2} * 2 * 8 * 2 * 2;
  EXPECT_EQ(plan.recall_bytes, entry * plan.store_pages * kRecallPage);
  const double read = must(session->stats()).decode.bytes - must(plain->stats()).decode.bytes;
  EXPECT_GT(read, 0.95 * static_cast<double>(plan.recall_bytes));
  EXPECT_LE(read, static_cast<double>(plan.recall_bytes));
  EXPECT_EQ(plain->plan().recall_bytes, 0u);
}

TEST(RecalledAll, TheBudgetCoversTheIndexOfAFile) {
  SessionOptions o = with_all();
  const uint64_t without = must(make_plan(*seeded_model().model, *cpu(), o)).io;
  std::swap(o.recall_mem, o.recall_disk);
  const MemoryPlan plan = must(make_plan(*seeded_model().model, *cpu(), o));
  EXPECT_GE(plan.io, without + RecallStore::bytes(recall_shape(*seeded_model().model, plan.options)));
}

// The first layer has stored its keys when the file of the second one fails.
TEST(RecalledAll, AStepThatBeginsAnewCountsSaturatedNumbersOnce) {
  Seeded saturating;
  saturating.edit = [](const std::string& name, std::vector<float>& values) {
    if (name == "blk.0.attn_k.weight")
      for (size_t i = 0; i < 32; ++i) values[9 * 32 + i] *= 60'000;
  };
  const SeededModel m = seeded_model(saturating);
  SessionOptions o = with_all();
  std::swap(o.recall_mem, o.recall_disk);
  const auto session = open_session(m.model, o);
  read(*session, seeded_tokens(260));
  const auto saturated_after = [&](int32_t token) {
    const auto twin = must(session->clone());
    must(twin->accept(token));
    return must(twin->stats()).saturated;
  };
  const uint64_t before = must(session->stats()).saturated;
  int32_t token = 0;
  while (saturated_after(token) == before) ++token;
  const uint64_t expected = saturated_after(token);
  RecallStore& store = *session->store();
  const std::vector<std::byte> zeros(64);
  must(store.file()->write(store.file_end() - zeros.size(), zeros.data(), zeros.size()));
  EXPECT_EQ(session->accept(token).code(), Code::kIo);
  must(session->accept(token));
  EXPECT_EQ(must(session->stats()).saturated, expected);
}

TEST(Recalled, AStoreHasNoMorePagesThanTheText) {
  SessionOptions o = with_store(48);
  const MemoryPlan plan = must(make_plan(*seeded_model().model, *cpu(), o));
  o.context = 500;
  const MemoryPlan shorter = must(make_plan(*seeded_model().model, *cpu(), o));
  EXPECT_EQ(shorter.store_pages, 32u);
  EXPECT_LT(shorter.store, plan.store / 10);
  o.recall_mem = plan.store / 200;  // less than the text needs
  EXPECT_LT(must(make_plan(*seeded_model().model, *cpu(), o)).store_pages, 32u);
}

TEST(RecalledAll, RefusesWhatCannotBe) {
  const auto refusal = [](SessionOptions o) {
    const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  SessionOptions o = with_all();
  o.recall_every = 8;
  EXPECT_NE(refusal(o).find("leave recall_every out"), std::string::npos);
  o = with_store(64);
  o.recall_prefill = true;
  EXPECT_NE(refusal(o).find("leave recall_prefill out"), std::string::npos);
  o.recall_mem = o.recall = 0;
  EXPECT_NE(refusal(o).find("give the store a size"), std::string::npos);
  o = with_all();
  o.selection = Selection::kQuest;
  EXPECT_NE(refusal(o).find("quest attends to a part of the pool"), std::string::npos);
  o = with_all();
  o.recall_mem = 0;
  EXPECT_NE(refusal(o).find("give the store a size"), std::string::npos);
  o = with_all();
  o.watch = true;
  const auto session = open_session(seeded_model().model, o);
  read(*session, seeded_tokens(260));
  std::vector<float> kept(260), attended(260);
  must(session->kept_by_position(kept.data(), nullptr));
  const Status unknown = session->kept_by_position(nullptr, attended.data());
  EXPECT_NE(unknown.message().find("it attended to a store"), std::string::npos);
}

// ---- some entries are recalled ----

TEST_P(RecalledOn, ResetForgetsTheStore) {
  const auto session = open(seeded_model().model, with_store(48));
  const std::vector<float> first = read(*session, seeded_tokens(260));
  generate(*session, 12);
  must(session->reset());
  EXPECT_EQ(must(session->stats()).stored, 0u);
  EXPECT_EQ(read(*session, seeded_tokens(260)), first);
}

TEST_P(RecalledOn, RewindsAsFarAsWithoutAStore) {
  const auto session = open(seeded_model().model, with_store(48));
  read(*session, seeded_tokens(260));
  const uint64_t earliest = session->state().last_eviction;
  generate(*session, 12);
  EXPECT_EQ(session->state().asking, 32u);
  must(session->rewind(262));
  EXPECT_EQ(session->state().asking, 22u);
  accept(*session, 1);
  generate(*session, 12);
  must(session->rewind(earliest));
  EXPECT_EQ(session->state().asking, 0u);
  EXPECT_EQ(session->rewind(earliest - 1).code(), Code::kCannotRewind);
  const Kept then = kept(*session);
  for (const auto& layer : then)
    for (const auto& head : layer) {
      EXPECT_TRUE(std::is_sorted(head.begin(), head.end()));
      EXPECT_EQ(head.back(), static_cast<int32_t>(earliest) - 1);
    }
}

// An interrupt at every boundary, and the same result.
TEST_P(RecalledOn, InterruptsChangeNothing) {
  const auto session = open(seeded_model().model, with_store(48));
  const auto stopped = open(seeded_model().model, with_store(48));
  const std::vector<int32_t> text = seeded_tokens(260);
  const auto insist = [&](const std::function<Status()>& call) {
    int interrupts = 0;
    for (;; ++interrupts) {
      if (interrupts < 200) stopped->interrupt();
      const Status status = call();
      if (status.ok()) break;
      ASSERT_EQ(status.code(), Code::kInterrupted) << status.message();
    }
    EXPECT_GT(interrupts, 0);
  };
  must(session->feed(text));
  insist([&] { return stopped->feed(text); });
  must(session->flush());
  insist([&] { return stopped->flush(); });
  for (int i = 0; i < 60; ++i) {
    const int32_t token = must(session->step());
    insist([&]() -> Status {
      THIMBLE_LET(mine, stopped->step());
      EXPECT_EQ(mine, token);
      return {};
    });
  }
  EXPECT_EQ(kept(*session), kept(*stopped));
}

// The first entries are evicted when a question needs room. It calls them back, whether or not it was
// interrupted before they were in the store.
TEST(Recalled, AnInterruptOfTheFirstEvictionChangesNothing) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(seeded_model().model, with_store(48));
  const auto stopped = open_session(seeded_model().model, with_store(48), device);
  for (Session* s : {session.get(), stopped.get()}) {
    read(*s, seeded_tokens(60));
    for (const int32_t token : seeded_tokens(60, 64, 5)) must(s->accept(token));
    EXPECT_EQ(s->state().evictions, 0u);
    must(s->feed(seeded_tokens(20, 64, 3)));
  }
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    stopped->interrupt();
  };
  must(session->flush());
  EXPECT_GT(insist([&] { return stopped->flush(); }), 1);
  device->before_submit = {};
  stopped->forget_interrupt();
  EXPECT_GT(session->state().recalled[0], 0u);
  EXPECT_EQ(kept(*session), kept(*stopped));
  EXPECT_EQ(flush(*session), flush(*stopped));
}

TEST(Recalled, ARefusedShrinkChangesNothing) {
  const auto session = open_session(seeded_model().model, with_store(48));
  read(*session, seeded_tokens(260));
  EXPECT_GT(session->state().recalled[0], 0u);
  const Kept before = kept(*session);
  EXPECT_EQ(session->shrink(1000).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(kept(*session), before);
}

// What a token attended to names places in the pool. An interrupt may come after some layers have other
// entries there.
TEST(Recalled, WhatWasAttendedToIsUnknownOnceEntriesMoved) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(seeded_model().model, with_store(48), device);
  read(*session, seeded_tokens(260));
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    session->interrupt();
  };
  int moved = 0;
  for (int i = 0; i < 40; ++i) {
    const uint64_t read = session->state().read;
    const uint32_t generation = session->state().generation;
    insist([&] {
      const Status status = session->step().status();
      if (session->state().read == read && session->state().generation != generation) {
        ++moved;
        EXPECT_EQ(session->state().attended, Attended::kUnknown);
      }
      return status;
    });
  }
  EXPECT_GT(moved, 0);
}

// The question has been read ahead, and is not read ahead again.
TEST(Recalled, AFileThatWasSavedAmidAQuestionGoesOnFromThere) {
  const auto device = std::make_shared<SpyDevice>(cpu());
  const auto session = open_session(seeded_model().model, with_store(48), device);
  const auto copy = open_session(seeded_model().model, with_store(48));
  read(*session, seeded_tokens(260));
  must(session->feed(seeded_tokens(20, 64, 3)));
  device->before_submit = [&](const Program&, const StepParams&, std::span<const HeadState>) {
    session->interrupt();
  };
  while (!session->state().ahead) ASSERT_EQ(session->flush().code(), Code::kInterrupted);
  device->before_submit = {};
  session->forget_interrupt();
  restore(*copy, save(*session));
  EXPECT_EQ(copy->state().ahead, 20u);
  EXPECT_EQ(flush(*copy), flush(*session));
  EXPECT_EQ(must(copy->stats()).prefill_tokens, 280u);
  EXPECT_EQ(go_on(*copy), go_on(*session));
}

TEST_P(RecalledOn, LaterTurnsFindTheirEntries) {
  const auto session = open(seeded_model().model, with_store(512));
  read(*session, seeded_tokens(200));
  generate(*session, 70);  // the pool is full before the end
  EXPECT_EQ(kept(*session)[0][0], all_positions(270));
  read(*session, seeded_tokens(150, 64, 3));
  EXPECT_EQ(kept(*session)[1][0], all_positions(420));
}

TEST(Recalled, ScoresATextAsStepsDo) { expect_scores_as_steps_do(with_store(48)); }

// In a small store, pages go; the budget holds, and what comes back is what is there.
TEST_P(RecalledOn, AFullStoreLosesPages) {
  SessionOptions o = with_store(512);
  o.recall_mem = 48 << 10;
  const auto session = open(seeded_model().model, o);
  read(*session, seeded_tokens(900));
  EXPECT_LE(session->plan().store, o.recall_mem);
  const uint32_t most = session->plan().store_pages * kRecallPage;
  EXPECT_LT(most, 700u);
  for (const uint32_t recalled : session->state().recalled) {
    EXPECT_LE(recalled, most);
    EXPECT_GT(recalled, most / 2);
  }
}

// Each entry is held, or in the store and not in the pool, or gone. What came back is held, and only that.
TEST_P(RecalledOn, TellsWhatIsHeldWhatIsInTheStoreAndWhatIsGone) {
  struct {
    uint64_t store;
    uint32_t recall;
    bool loses;
  } const cases[] = {{4 << 20, 64, false}, {4 << 20, kRecallAll, false}, {24 << 10, 64, true}, {0, 0, true}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.store);
    SessionOptions o = with_store(c.recall);
    o.recall_mem = c.store;
    if (c.recall == kRecallAll || !c.store) o.recall_every = 0;
    const auto session = open(seeded_model().model, o);
    read(*session, seeded_tokens(400));
    generate(*session, 9);  // some of what came back leaves again
    const uint64_t read = must(session->positions_read());
    std::vector<float> held(read), stored(read, 9.0f);
    must(session->kept_by_position(held.data(), nullptr));
    session->stored_by_position(stored);
    uint64_t gone = 0;
    double in_store = 0;
    for (uint64_t i = 0; i < read; ++i) {
      EXPECT_LE(held[i] + stored[i], 1.0f + 0x1p-20f) << i;
      gone += held[i] + stored[i] < 0.999f;
      in_store += static_cast<double>(stored[i]);
    }
    EXPECT_EQ(gone > 0, c.loses);
    EXPECT_EQ(in_store > 0, c.store != 0);
    const auto& recalled = session->state().recalled;
    const uint64_t entries = session->store() ? session->store()->entries() : 0;
    EXPECT_NEAR(in_store * static_cast<double>(recalled.size()),
                static_cast<double>(entries - std::accumulate(recalled.begin(), recalled.end(), uint64_t{0})),
                1e-2);  // a rounding of 2^-24 for each of 400 positions of each head
  }
}

TEST(Recalled, RefusesWhatCannotBe) {
  const auto refusal = [](SessionOptions o) {
    const Status status = make_plan(*seeded_model().model, *cpu(), o).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  };
  SessionOptions o = with_store(48);
  o.recall_mem = 0;
  EXPECT_NE(refusal(o).find("give the store a size"), std::string::npos);
  o = with_store(48);
  o.recall_mem = 1000;
  EXPECT_NE(refusal(o).find("has no room for a page of each head"), std::string::npos);
  o = with_store(48);
  o.retention = Retention::kNone;
  EXPECT_NE(refusal(o).find("it evicts nothing"), std::string::npos);
  o = with_store(48);
  o.local = 0;
  EXPECT_NE(refusal(o).find("local cannot be 0"), std::string::npos);
}

// A session whose store is in a file, of one layer, so that entries do not depend on what was recalled
// before.
struct WithFile {
  SessionOptions options = with_store(48);
  std::shared_ptr<const Model> model;
  std::unique_ptr<Session> session;
  std::vector<int32_t> text = seeded_tokens(260);

  WithFile() {
    Seeded one;
    one.layers = 1;
    model = seeded_model(one).model;
    options.recall_mem = 0;
    options.recall_disk = 1 << 20;
    session = open_session(model, options);
    read(*session, text);
    const std::vector<int32_t> more = generate(*session, 3);
    text.insert(text.end(), more.begin(), more.end());
    EXPECT_GT(session->state().recalled[0], 0u);
  }
  void damage() {
    RecallStore& store = *session->store();
    const std::vector<std::byte> zeros(store.file_end());
    must(store.file()->write(0, zeros.data(), zeros.size()));
  }
  void expect_end_of_store(const Status& failed) {
    EXPECT_EQ(failed.code(), Code::kIo);
    EXPECT_EQ(failed.message(),
              "the temporary file of evicted entries was changed; the session goes on without its store of "
              "evicted entries");
    for (const uint32_t recalled : session->state().recalled) EXPECT_EQ(recalled, 0u);
    EXPECT_EQ(must(session->stats()).stored, 0u);
  }
};

// What a file cannot give back is one clear error. The session goes on without its store, and what it says is
// what a session says that never had one.
TEST(Recalled, AFileThatFailsEndsTheStore) {
  WithFile f;
  EXPECT_LE(f.session->plan().store_file, f.options.recall_disk);
  f.damage();
  Status failed;
  for (int i = 0; i < 20; ++i) {
    const Result<int32_t> token = f.session->step();
    failed = token.status();
    if (!token.ok()) break;
    f.text.push_back(*token);
  }
  f.expect_end_of_store(failed);
  f.text.push_back(must(f.session->step()));  // chosen by logits from before

  f.options.recall_disk = f.options.recall = 0;
  const auto without = open_session(f.model, f.options);
  read(*without, std::span(f.text).first(260));
  for (size_t i = 260; i < f.text.size(); ++i) must(without->accept(f.text[i]));
  EXPECT_EQ(kept(*f.session), kept(*without));
  EXPECT_EQ(generate(*f.session, 60), generate(*without, 60));
  EXPECT_EQ(read(*f.session, seeded_tokens(100, 64, 3)), read(*without, seeded_tokens(100, 64, 3)));
}

TEST(Recalled, AFileThatFailsCanNeitherBeSavedNorCloned) {
  WithFile saved, cloned;
  saved.damage();
  saved.expect_end_of_store(saved.session->save([](const void*, size_t) { return Status(); }, {}));
  cloned.damage();
  cloned.expect_end_of_store(cloned.session->clone().status());
  const auto copy = open_session(saved.model, saved.options);
  restore(*copy, save(*saved.session));
  const auto twin = must(cloned.session->clone());
  const Outcome expected = go_on(*saved.session);
  EXPECT_EQ(go_on(*cloned.session), expected);
  EXPECT_EQ(go_on(*twin), expected);
  EXPECT_EQ(must(copy->stats()).stored, 0u);
}

// A question is read twice, and its numbers beyond the range of halves are counted once.
TEST(Recalled, CountsSaturatedNumbersOnce) {
  Seeded one;
  one.layers = 1;
  one.edit = [](const std::string& name, std::vector<float>& values) {
    if (name.ends_with("attn_k.weight"))
      for (size_t i = 0; i < 32; ++i) values[9 * 32 + i] *= 60'000;
  };
  const SeededModel m = seeded_model(one);
  SessionOptions o = with_store(48);
  const auto session = open_session(m.model, o);
  o.recall_mem = o.recall = 0;
  const auto without = open_session(m.model, o);
  for (Session* s : {session.get(), without.get()}) read(*s, seeded_tokens(260));
  EXPECT_GT(session->state().recalled[0], 0u);
  EXPECT_GT(must(without->stats()).saturated, 0u);
  EXPECT_EQ(must(session->stats()).saturated, must(without->stats()).saturated);
}

// Restoring a session gives it its store back, even if its file had failed. Without room for a new file,
// nothing changes.
TEST(Recalled, RestoringNeedsANewFile) {
  SessionOptions o = with_store(48);
  o.recall_mem = 0;
  o.recall_disk = 1 << 20;
  const auto session = open_session(seeded_model().model, o), copy = open_session(seeded_model().model, o);
  read(*session, seeded_tokens(260));
  const SessionBytes saved = save(*session);
  read(*copy, seeded_tokens(150, 64, 3));
  const SessionBytes before = save(*copy);
  if (std::filesystem::is_directory("/proc")) {  // where nobody can make a file
    const char* const folder = std::getenv("TMPDIR");
    const std::string old = folder ? folder : "/tmp";
    setenv("TMPDIR", "/proc", 1);
    EXPECT_EQ(copy->restore(lend(saved), "saved").status().code(), Code::kIo);
    setenv("TMPDIR", old.c_str(), 1);
  }
  EXPECT_EQ(save(*copy), before);
  copy->store()->close();
  restore(*copy, saved);
  EXPECT_EQ(copy->store()->file_end(), session->store()->file_end());
  EXPECT_EQ(go_on(*copy), go_on(*session));
  EXPECT_GT(session->state().recalled[0], 0u);
}

// Options in pairs: the plan is kept, recalled entries fit into their part, positions ascend, and a saved
// session continues alike. Slow devices take them one by one, without the first six, which need shaders of
// their own and have the same store.
TEST_P(RecalledOn, WorksWithOtherOptions) {
  Seeded wide;
  wide.head_dim = 32;
  const SeededModel m = seeded_model(wide);
  // A little more than a small pool needs, also with attention to everything in chunks of 100 rows.
  SessionOptions largest = with_store(kRecallAll);
  largest.recall_every = 0;
  largest.chunk = 100;
  const uint64_t budget = must(make_plan(*m.model, *device(), largest)).total + (2 << 20);
  const std::function<void(SessionOptions&)> changes[] = {
      [](SessionOptions& o) { o.retention = Retention::kRandom; },
      [&](SessionOptions& o) { o.retention = Retention::kLocret, o.retainer = m.retainer; },
      [](SessionOptions& o) { o.retention = Retention::kKeyDiff; },
      [](SessionOptions& o) { o.retention = Retention::kTova; },
      [](SessionOptions& o) { o.retention = Retention::kReread; },
      [&](SessionOptions& o) { o.retention = Retention::kMix, o.retainer = m.retainer; },
      [](SessionOptions& o) { o.selection = Selection::kTokenSelect, o.select_k = 20, o.select_local = 24; },
      [](SessionOptions& o) { o.selection = Selection::kQuest, o.select_k = 48; },
      [](SessionOptions& o) { o.positions = Positions::kOriginal; },
      [](SessionOptions& o) { o.retain_scope = RetainScope::kLayer; },
      [](SessionOptions& o) { o.watch = true; },
      [](SessionOptions& o) { o.recall_mem = 0, o.recall_disk = 1 << 18; },
      [](SessionOptions& o) { o.recall_mem = 40 << 10; },
      [](SessionOptions& o) { o.recall_format = KvFormat::kQ4_0; },
      [](SessionOptions& o) { o.key_format = KvFormat::kQ8_0, o.value_format = KvFormat::kQ4_0; },
      [](SessionOptions& o) { o.recall = 16; },
      [](SessionOptions& o) { o.recall = kRecallAll, o.recall_every = 0; },
      [](SessionOptions& o) { o.recall_every = 1; },
      [](SessionOptions& o) { o.chunk = 100; },
      [&](SessionOptions& o) { o.budget = budget, o.pool = 0, o.context = 4000; },
  };
  int sessions = 0;
  for (size_t a = is_slow() ? 6 : 0; a < std::size(changes); ++a)
    for (size_t b = a; b < (is_slow() ? a + 1 : std::size(changes)); ++b) {
      SCOPED_TRACE(::testing::Message() << a << ", " << b);
      SessionOptions o = with_store(48);
      changes[a](o);
      changes[b](o);
      if (o.recall_mem && o.recall_disk) o.recall_mem = 0;
      auto made = Session::create(m.model, device(), o);
      if (!made.ok()) {  // two options that contradict each other
        EXPECT_EQ(made.status().code(), Code::kInvalidArgument) << made.status().message();
        continue;
      }
      const std::unique_ptr<Session> session = std::move(*made);
      must(session->set_sampler(kWarm));
      read(*session, seeded_tokens(260));
      generate(*session, 30);
      EXPECT_LE(session->allocated(), session->plan().total);
      EXPECT_LE(session->plan().total, o.budget ? o.budget : UINT64_MAX);
      EXPECT_LE(session->plan().store, o.recall_mem);
      EXPECT_LE(session->plan().store_file, o.recall_disk);
      for (size_t i = 0; i < session->runs().size(); ++i) {
        EXPECT_LE(session->state().recalled[i], o.most_recalled());
        EXPECT_LE(session->state().own(i), session->runs()[i].capacity - o.most_recalled());
      }
      for (const auto& layer : kept(*session))
        for (const auto& head : layer)
          EXPECT_EQ(std::adjacent_find(head.begin(), head.end(), std::greater_equal<>()), head.end());
      o.pool = session->plan().options.pool;  // a budget has room for more if the weights are placed already
      const auto copy = must(Session::create(m.model, device(), o));
      restore(*copy, save(*session));
      EXPECT_EQ(go_on(*copy), go_on(*session));
      if (HasFailure()) return;
      ++sessions;
    }
  EXPECT_GT(sessions, is_slow() ? 12 : 100);
}

}  // namespace
}  // namespace thimble::test
