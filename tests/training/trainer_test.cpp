// Tests training, from texts to the sidecar file.
#include "training/trainer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "runtime/heads/info.h"
#include "tests/support/spy_device.h"
#include "tests/support/synthetic_model.h"
#include "tests/training/small_trainer.h"

namespace thimble::test {
namespace {

using Phase = TrainingProgress::Phase;

class Training : public ::testing::Test {
 protected:
  TrainingOptions options(const std::string& output) const {
    TrainingOptions o;
    o.data = {book};
    o.output = folder.file(output);
    o.texts = 2;
    o.steps = 6;
    o.text_tokens = 1024;
    return o;
  }
  std::unique_ptr<Trainer> open(const TrainingOptions& o,
                                const std::shared_ptr<Device>& device = cpu()) const {
    return must(Trainer::create(small.model, device, o));
  }
  static void finish(Trainer& trainer) {
    while (must(trainer.step())) {
    }
  }
  // Returns the file that an uninterrupted training writes.
  std::string trained(const TrainingOptions& o, const std::shared_ptr<Device>& device = cpu()) const {
    finish(*open(o, device));
    return contents_of(o.output);
  }
  std::shared_ptr<const Retainer> retainer(const std::string& path) const {
    return must(small.model->open_retainer(must(MappedFile::open(path)), path));
  }

  const Folder folder;
  const SeededModel small = seeded_model(bytes_model(true));
  const std::string book = folder.written("book", some_book());
};

TEST_F(Training, WritesARetainerThatFitsItsModel) {
  for (const Retainer::Kind kind :
       {Retainer::Kind::kLocret, Retainer::Kind::kMlp, Retainer::Kind::kLinear, Retainer::Kind::kSink}) {
    TrainingOptions o = options("kind" + std::to_string(static_cast<int>(kind)));
    o.kind = kind;
    const auto trainer = open(o);
    EXPECT_EQ(trainer->progress().phase, Phase::kReading);
    EXPECT_GT(trainer->progress().total, 6 * 1024u);
    EXPECT_EQ(trainer->verdict(), "");
    finish(*trainer);
    EXPECT_EQ(trainer->progress().phase, Phase::kDone);
    const auto made = retainer(o.output);
    EXPECT_EQ(made->kind, kind);
    EXPECT_EQ(made->input, kind == Retainer::Kind::kLocret ? Retainer::Input::kQkv : Retainer::Input::kX);
    EXPECT_EQ(made->shares.size(), trainer->shares_help() ? 4u : 0u);
    EXPECT_EQ(made->retention, policy_name(trainer->retention()));
    const std::string steps = kind == Retainer::Kind::kLinear ? "" : "\"steps\": 6, ";
    const std::string trained =
        R"("trained": {"texts": 2, "tokens": 2048, )" + steps + R"("seed": 0, "data": "book"})";
    EXPECT_NE(must(describe_heads(o.output, nullptr)).find(trained), std::string::npos) << trained;
    EXPECT_GT(trainer->dense().asked, 0u);
    const std::vector<Trainer::Checked>& checked = trainer->checked();
    for (const Trainer::Checked& c : checked)
      for (const Recall& recall : {c.locret, c.keydiff, c.mix, c.window, c.counted})
        EXPECT_EQ(recall.asked, trainer->dense().asked);
    // Shares are written if they give better results than equal pools, and the file records the results.
    EXPECT_EQ(trainer->retention(), Trainer::best_of(checked, trainer->dense()));
    Recall equal, counted;
    for (const Trainer::Checked& c : checked) {
      equal.add(trainer->retention() == Retention::kLocret    ? c.locret
                : trainer->retention() == Retention::kKeyDiff ? c.keydiff
                                                              : c.mix);
      counted.add(c.counted);
    }
    EXPECT_EQ(trainer->shares_help(), counted.probability() > equal.probability());
    const auto kept = [&](const Recall& recall) {
      return static_cast<float>(recall.probability() / trainer->dense().probability());
    };
    const Gguf file = must(Gguf::parse(made->file, o.output));
    EXPECT_EQ(*must(file.get_string("retainer.checked.measure")), "probability");
    EXPECT_EQ(*must(file.get_uint("retainer.checked.questions")), trainer->dense().asked);
    EXPECT_EQ(*must(file.get_uint("retainer.checked.tokens")), 1024u);
    EXPECT_EQ(*must(file.get_floats("retainer.checked.dense")),
              (std::vector<float>{static_cast<float>(trainer->dense().share()),
                                  static_cast<float>(trainer->dense().perplexity())}));
    const auto expect = [&](const char* way, const auto& recall) {
      std::vector<float> all;
      for (const Trainer::Checked& c : checked) all.push_back(kept(recall(c)));
      EXPECT_EQ(*must(file.get_floats(std::string("retainer.checked.") + way)), all) << way;
    };
    using Checked = const Trainer::Checked&;
    expect("heads", [&](Checked c) { return trainer->shares_help() ? c.counted : trainer->retainer(c); });
    expect("locret", [](Checked c) { return c.locret; });
    expect("keydiff", [](Checked c) { return c.keydiff; });
    expect("mix", [](Checked c) { return c.mix; });
    expect("window", [](Checked c) { return c.window; });
    // A model with random weights answers nothing, which the verdict reports.
    EXPECT_NE(trainer->verdict().find("even when nothing is evicted"), std::string::npos)
        << trainer->verdict();
    EXPECT_FALSE(std::filesystem::exists(o.output + ".partial"));
  }
}

// The heads of deepseek2 make their values from channels that they share.
TEST_F(Training, OfLatentAttentionTakesEveryKind) {
  THIMBLE_NEEDS(shared_file("tools/synth_gguf.py"));
  const auto model =
      SyntheticFile("tiny-deepseek2 f16 FILE --seed 4 --sharp 3 --ctx 4096", "trained_deepseek2").open();
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kMlp, Retainer::Kind::kLinear,
                                    Retainer::Kind::kSink, Retainer::Kind::kAdore}) {
    TrainingOptions o = options("latent" + std::to_string(static_cast<int>(kind)));
    o.kind = kind;
    o.steps = 2;
    const std::unique_ptr<thimble::Training> trainer = must(open_training(model, cpu(), o));
    while (must(trainer->step())) {
    }
    EXPECT_EQ(must(model->open_retainer(must(MappedFile::open(o.output)), o.output))->kind, kind);
  }
  TrainingOptions o = options("weighed");
  o.target = Target::kLogKvzipPlus;
  const Status refused = Trainer::create(model, cpu(), o).status();
  EXPECT_EQ(refused.code(), Code::kUnsupported);
  EXPECT_EQ(
      refused.message(),
      "log_kvzip_plus weighs the values of each head, and heads of this model make theirs from channels "
      "that they share; choose another --target");
}

// The kinds and targets that are not the default, in different combinations.
struct Recipe {
  Retainer::Kind kind;
  Target target;
};
constexpr Recipe kRecipes[] = {{Retainer::Kind::kSink, Target::kLogKvzipPlus},
                               {Retainer::Kind::kMlp, Target::kLogKvzipPlus},
                               {Retainer::Kind::kLinear, Target::kLogKvzipPlus},
                               {Retainer::Kind::kSink, Target::kLogProb}};

// Trains twice. The second training is stopped once while it reads and once while it fits, and uses one
// thread at the end.
TEST_F(Training, OfEveryRecipeGivesOneFile) {
  std::vector<std::string> files;
  for (const Recipe& recipe : kRecipes) {
    const auto with = [&](const char* name) {
      TrainingOptions o = options(name + std::to_string(files.size()));
      o.kind = recipe.kind;
      o.target = recipe.target;
      return o;
    };
    const std::string whole = trained(with("whole"));
    const TrainingOptions o = with("broken");
    {
      const auto trainer = open(o);
      while (trainer->progress().done < 2500) ASSERT_TRUE(must(trainer->step()));
      must(trainer->save());
    }
    {
      const auto trainer = open(o);
      EXPECT_TRUE(trainer->resumed());
      while (trainer->progress().phase != Phase::kFitting || trainer->progress().done < 1)
        ASSERT_TRUE(must(trainer->step()));
      must(trainer->save());
    }
    EXPECT_EQ(trained(o, must(open_device("cpu", {.threads = 1}))), whole);
    EXPECT_EQ(std::count(files.begin(), files.end(), whole), 0);
    files.push_back(whole);
  }
}

// A model with random weights answers nothing, so the probability of right answers decides. The file equals
// that of a training for the chosen target.
TEST_F(Training, TriesTargetsAndGoesOnWithTheBest) {
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kLinear}) {
    const auto with = [&](const char* name) {
      TrainingOptions o = options(name + std::to_string(static_cast<int>(kind)));
      o.kind = kind;
      return o;
    };
    TrainingOptions o = with("auto");
    o.tries_targets = true;
    {
      const auto trainer = open(o);
      EXPECT_EQ(trainer->progress().phase, Phase::kTrying);
      EXPECT_EQ(trainer->progress().total, 3u);
      while (trainer->progress().done < 1) ASSERT_TRUE(must(trainer->step()));
      for (int i = 0; i < 6; ++i) ASSERT_TRUE(must(trainer->step()));
    }
    const auto trainer = open(o);
    EXPECT_EQ(trainer->progress().done, 1u);
    finish(*trainer);
    ASSERT_EQ(trainer->tried().size(), 3u);
    for (const Trainer::Tried& tried : trainer->tried())
      EXPECT_EQ(tried.recall.asked, 2 * trainer->dense().asked);
    double most = 0;
    for (const Trainer::Tried& tried : trainer->tried())
      most = std::max(most, tried.recall.probability() / tried.dense.probability());
    EXPECT_GT(most, 0);
    for (const Trainer::Tried& tried : trainer->tried()) {
      if (tried.target != trainer->target()) continue;
      EXPECT_EQ(tried.recall.probability() / tried.dense.probability(), most);
    }
    TrainingOptions alone = with("alone");
    alone.target = trainer->target();
    EXPECT_TRUE(contents_of(o.output) == trained(alone));
    for (const char* ending : {".tried", ".trying", ".trying.partial", ".partial"})
      EXPECT_FALSE(std::filesystem::exists(o.output + ending)) << ending;
  }
}

TEST(Targets, AreChosenByWhatIsAnswered) {
  using Tried = Trainer::Tried;
  const auto best = [](const std::vector<Tried>& tried) { return Trainer::best_of(tried).target; };
  const Recall all{48, 48}, none{48, 0, 10, -20};
  EXPECT_EQ(best({{Target::kLogProb, {48, 20}, all},
                  {Target::kMaxLogit, {48, 21}, all},
                  {Target::kLogKvzipPlus, {48, 3}, all}}),
            Target::kMaxLogit);
  EXPECT_EQ(best({{Target::kLogProb, {48, 20}, all}, {Target::kMaxLogit, {48, 20}, all}}), Target::kLogProb);
  EXPECT_EQ(best({{Target::kLogProb, {48, 1, 10, -30}, none}, {Target::kMaxLogit, {48, 0, 10, -29}, none}}),
            Target::kMaxLogit);
  EXPECT_EQ(best({{Target::kLogProb, {}}, {Target::kMaxLogit, {48, 0}}}), Target::kMaxLogit);
  EXPECT_EQ(best({{Target::kLogProb, {}}, {Target::kMaxLogit, {}}}), Target::kLogProb);
}

// With 48 questions, two shares differ by chance by up to sqrt(0.5 / 48), 10.2 %, in two of three cases.
void expect_judgement(Recall dense, Recall retainer, Recall window, const char* words) {
  const std::string said = judgement_of(dense, retainer, window);
  EXPECT_NE(said.find(words), std::string::npos) << said;
}
TEST(Judgement, CallsARetainerGoodOnlyIfItBeatsAWindow) {
  const auto expect = expect_judgement;
  expect({}, {}, {}, "answers 0 % of these questions even when nothing is evicted");
  expect({48, 23}, {48, 23}, {48, 0}, "answers 48 % of these questions even");
  expect({48, 24}, {48, 24}, {48, 0}, "keeps what these questions need");
  expect({48, 48}, {48, 14}, {48, 10}, "not better than a window");
  // Questions that a window answers show nothing.
  expect({48, 48}, {48, 48}, {48, 44}, "not better than a window");
  expect({48, 48}, {48, 0}, {48, 10}, "not better than a window");
  expect({48, 48}, {48, 15}, {48, 10}, "beats a window and loses 69 %");
  expect({48, 48}, {48, 43}, {48, 10}, "beats a window and loses 10 %");
  expect({48, 48}, {48, 44}, {48, 10}, "keeps what these questions need");
}

// With 48 questions for each of two memory sizes, the noise is 0.5 / sqrt(96 / 2) of them, 6.9 of 96.
TEST(BestRetention, IsTheMixUnlessAnotherIsBetterByMoreThanChance) {
  const auto best = [](double locret, double keydiff, double mix) {
    Trainer::Checked half{.part = 8, .window = {48, 48}};
    half.locret = {48, locret / 2};
    half.keydiff = {48, keydiff / 2};
    half.mix = {48, mix / 2};
    return Trainer::best_of({half, half}, {48, 48});
  };
  EXPECT_EQ(best(50, 50, 50), Retention::kMix);
  EXPECT_EQ(best(56, 56, 50), Retention::kMix);
  EXPECT_EQ(best(58, 56, 50), Retention::kLocret);
  EXPECT_EQ(best(56, 58, 50), Retention::kKeyDiff);
  EXPECT_EQ(best(60, 58, 50), Retention::kLocret);
  EXPECT_EQ(best(58, 60, 50), Retention::kKeyDiff);
  // Probabilities are compared for the same tokens, so every difference counts.
  const auto likely = [](double locret, double keydiff, double mix) {
    return Trainer::best_of({{.part = 8,
                              .locret = {48, 0, 10, locret},
                              .keydiff = {48, 0, 10, keydiff},
                              .mix = {48, 0, 10, mix}}},
                            {48, 3, 10, -10});
  };
  EXPECT_EQ(likely(-12, -12, -12), Retention::kMix);
  EXPECT_EQ(likely(-12, -11.9, -12), Retention::kKeyDiff);
  EXPECT_EQ(likely(-11.9, -12, -12), Retention::kLocret);
}

// Tests a model that answers nothing right: its log-probabilities are -1 per token with dense attention, and
// exp(-0.1) is 90 %.
TEST(Judgement, OfAModelThatAnswersNothingIsOfProbabilities) {
  const auto expect = [](double retainer, double window, const char* words) {
    expect_judgement({48, 3, 10, -10}, {48, 0, 10, 10 * retainer}, {48, 0, 10, 10 * window}, words);
  };
  expect(-1.2, -2, "answers 6 % of these questions even when nothing is evicted");
  expect(-1.2, -2, "at an eighth of the memory, the retainer keeps 82 % of it, and a window 37 %. ");
  expect(-1.2, -2, "beats a window and loses 18 % of that probability");
  expect(-1.1, -2, "keeps what these questions need");
  expect(-2, -2, "not better than a window");
  expect(-0.9, -0.8, "not better than a window");
}

// Tests prompts whose lengths differ from a text's, together with a book.
TEST_F(Training, LearnsFromPromptsAndAnswers) {
  std::string lines;
  for (uint32_t i = 0; i < 10; ++i)
    lines += "{\"instruction\": \"" + some_book().substr(i * 500, 300 + i * 100) + "\", \"output\": \"Yes " +
             std::to_string(i) + ".\"}\n";
  TrainingOptions o = options("lines");
  o.data = {folder.written("lines.jsonl", lines)};
  o.texts = 4;
  const std::string whole = trained(o);
  TrainingOptions both = options("both");
  both.data.push_back(o.data[0]);
  both.texts = 4;
  EXPECT_NE(trained(both), whole);
  TrainingOptions brief = options("brief");
  brief.data = {folder.written("brief.jsonl", [&] {
    std::string text;
    for (uint32_t i = 0; i < 30; ++i)
      text += "{\"prompt\": \"" + some_book().substr(i * 90, 90) + "\", \"answer\": \"Yes.\"}\n";
    return text;
  }())};
  const auto refused = Trainer::create(small.model, cpu(), brief);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("256 tokens"), std::string::npos) << refused.status().message();
}

TEST_F(Training, IsRefusedIfTheModelGivesNaN) {
  Seeded s = bytes_model(true);
  s.edit = [](const std::string& name, std::vector<float>& values) {
    if (name == "blk.1.attn_norm.weight") values[3] = NAN;
  };
  const SeededModel broken = seeded_model(s);
  for (const Recipe& recipe : kRecipes) {
    TrainingOptions o = options("nan" + std::to_string(&recipe - kRecipes));
    o.kind = recipe.kind;
    o.target = recipe.target;
    const auto trainer = must(Trainer::create(broken.model, cpu(), o));
    Result<bool> more = true;
    while (more.ok() && *more) more = trainer->step();
    ASSERT_FALSE(more.ok());
    EXPECT_EQ(more.status().code(), Code::kNotFinite) << more.status().message();
    EXPECT_FALSE(std::filesystem::exists(o.output));
  }
}

TEST_F(Training, GivesTheSameFileTwiceAndWithAnyNumberOfThreads) {
  const std::string first = trained(options("first"));
  EXPECT_FALSE(first.empty());
  EXPECT_EQ(trained(options("second")), first);
  EXPECT_EQ(trained(options("third"), must(open_device("cpu", {.threads = 1}))), first);
  TrainingOptions other = options("other");
  other.seed = 1;
  EXPECT_NE(trained(other), first);
}

// The training is stopped while it reads the second text, and again after two steps of the fit.
TEST_F(Training, GoesOnAsIfItHadNotBeenStopped) {
  const std::string whole = trained(options("whole"));
  const TrainingOptions o = options("broken");
  {
    const auto trainer = open(o);
    while (trainer->progress().done < 2048) ASSERT_TRUE(must(trainer->step()));
    EXPECT_FALSE(trainer->resumed());
  }
  {
    const auto trainer = open(o);
    EXPECT_TRUE(trainer->resumed());
    EXPECT_GE(trainer->progress().done, 1024u);
    while (trainer->progress().phase != Phase::kFitting || trainer->progress().done < 2)
      ASSERT_TRUE(must(trainer->step()));
    must(trainer->save());
    ASSERT_TRUE(must(trainer->step()));  // this step is lost
  }
  const auto trainer = open(o);
  while (trainer->progress().phase == Phase::kReading) ASSERT_TRUE(must(trainer->step()));
  EXPECT_EQ(trainer->progress().done, 2u);
  finish(*trainer);
  EXPECT_EQ(contents_of(o.output), whole);
}

TEST_F(Training, TakesNoStateOfAnotherTraining) {
  TrainingOptions o = options("out");
  {
    const auto trainer = open(o);
    while (trainer->progress().done < 2048) ASSERT_TRUE(must(trainer->step()));
  }
  o.seed = 4;
  const auto refused = Trainer::create(small.model, cpu(), o);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kMismatch);
  EXPECT_NE(refused.status().message().find(".partial"), std::string::npos);
}

// A record whose end was not written, or whose bytes changed, is read again.
TEST_F(Training, ReadsAgainWhatWasNotKeptWhole) {
  const std::string whole = trained(options("whole"));
  for (const bool torn : {true, false}) {
    const TrainingOptions o = options(torn ? "torn" : "spoilt");
    {
      const auto trainer = open(o);
      while (trainer->progress().done < 4096) ASSERT_TRUE(must(trainer->step()));
    }
    const std::string state = o.output + ".partial";
    const uint64_t size = std::filesystem::file_size(state);
    if (torn) {
      std::filesystem::resize_file(state, size - 9);
    } else {
      std::fstream file(state, std::ios::binary | std::ios::in | std::ios::out);
      file.seekp(static_cast<std::streamoff>(size / 2)).write("spoilt", 6);
    }
    finish(*open(o));
    EXPECT_EQ(contents_of(o.output), whole);
  }
}

// Layers with a window drop entries with every retention, and the questions of the check are long.
TEST_F(Training, ChecksAModelWithWindows) {
  Seeded s = bytes_model(true);
  s.window = 16;
  const SeededModel windowed = seeded_model(s);
  TrainingOptions o = options("windowed");
  const auto made = must(Trainer::create(windowed.model, cpu(), o));
  finish(*made);
  EXPECT_EQ(made->dense().asked, made->checked()[0].window.asked);
  TrainingOptions shared = options("windowed and shared");
  shared.heads = o.output;
  const auto divided = must(Trainer::create(windowed.model, cpu(), shared));
  finish(*divided);
  EXPECT_EQ(divided->dense().answered, made->dense().answered);
}

// With the smallest accepted budget, no phase allocates more on the device, and the check begins after all
// memory was returned. On a CPU, weights stay where they are.
TEST_F(Training, AllocatesNoMoreThanItsBudget) {
  for (const Retainer::Kind kind : {Retainer::Kind::kLocret, Retainer::Kind::kLinear}) {
    const auto spy = std::make_shared<SpyDevice>(cpu());
    TrainingOptions o = options("budget" + std::to_string(static_cast<int>(kind)));
    o.kind = kind;
    std::unique_ptr<Trainer> trainer;
    for (o.memory = 1; !trainer;) {
      auto tried = Trainer::create(small.model, spy, o);
      if (tried.ok())
        trainer = std::move(*tried);
      else
        o.memory += tried.status().bytes_missing();
    }
    uint64_t of_check = UINT64_MAX;
    while (must(trainer->step())) {
      EXPECT_LE(spy->peak_bytes, o.memory);
      if (of_check == UINT64_MAX && trainer->progress().phase == Phase::kChecking) of_check = spy->live_bytes;
    }
    EXPECT_EQ(of_check, 0u);
  }
}

// Asks questions after each quarter of the steps except the last, unless --mem-budget has no room for it.
// Nothing else changes.
TEST_F(Training, AsksWhileItFits) {
  TrainingOptions o = options("asked");
  const auto asked_after = [&](Trainer& trainer) {
    std::vector<uint64_t> steps;
    while (must(trainer.step())) {
      const TrainingProgress p = trainer.progress();
      if (p.recall == -1) continue;
      EXPECT_EQ(p.phase, Phase::kFitting);
      EXPECT_GT(p.recall, 0);  // a share of probabilities, which is never 0 with random weights
      EXPECT_EQ(p.dense, trainer.dense().share());
      steps.push_back(p.done);
    }
    EXPECT_FALSE(std::filesystem::exists(o.output + ".asked"));
    return steps;
  };
  folder.written("asked.asked", "left by a process that was killed");
  EXPECT_EQ(asked_after(*open(o)), (std::vector<uint64_t>{1, 3, 4}));
  const std::string whole = contents_of(o.output);
  o.output = folder.file("unasked");
  for (o.memory = 1;;) {
    const auto tried = Trainer::create(small.model, cpu(), o);
    if (tried.ok()) break;
    o.memory += tried.status().bytes_missing();
  }
  EXPECT_EQ(asked_after(*open(o)), std::vector<uint64_t>());
  EXPECT_EQ(contents_of(o.output), whole);
}

TEST_F(Training, SaysThatTheFileIsWrittenIfTheCheckFails) {
  const auto spy = std::make_shared<SpyDevice>(cpu());
  const TrainingOptions o = options("unchecked");
  const auto trainer = open(o, spy);
  while (trainer->progress().phase != Phase::kChecking) ASSERT_TRUE(must(trainer->step()));
  spy->fail_allocation = spy->allocations;
  const Status failed = trainer->step().status();
  EXPECT_EQ(failed.code(), Code::kOutOfMemory);
  EXPECT_EQ(failed.message(),
            o.output + " is written, but could not be checked: the test refuses this allocation");
  EXPECT_EQ(retainer(o.output)->kind, Retainer::Kind::kMlp);
}

TEST_F(Training, KeepsRunsOfTheTextsIfMemoryIsShort) {
  TrainingOptions o = options("small");
  o.memory = 1;
  const auto refused = Trainer::create(small.model, cpu(), o);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kBudget);
  EXPECT_GT(refused.status().bytes_missing(), 0u);
  // 16 runs are the minimum, and these texts have only 8: room for 16 is needed nevertheless.
  const std::string all = trained(options("all"));
  o.texts = 6;  // 24 runs
  for (;;) {
    const auto tried = Trainer::create(small.model, cpu(), o);
    if (tried.ok()) break;
    o.memory += tried.status().bytes_missing();
  }
  TrainingOptions roomy = options("roomy");
  roomy.texts = 6;
  EXPECT_NE(trained(o), trained(roomy));
}

// The sums of a linear retainer are written when they are saved, alternately at one of two places. Texts that
// were read since are read again. If one place is damaged, the texts that it had in addition to the other are
// also read again.
TEST_F(Training, OfALinearOneGoesOnFromItsSums) {
  TrainingOptions o = options("whole");
  o.kind = Retainer::Kind::kLinear;
  o.texts = 4;
  const std::string whole = trained(o);
  const auto read_until = [](Trainer& trainer, uint64_t tokens) {
    while (trainer.progress().done < tokens) ASSERT_TRUE(must(trainer.step()));
  };
  const std::string state = folder.file("broken") + ".partial";
  o.output = folder.file("broken");
  uint64_t of_first, of_second;  // tokens that were read when the sums were saved
  {
    const auto trainer = open(o);
    read_until(*trainer, 2048);
    must(trainer->save());
    read_until(*trainer, 4200);
    must(trainer->save());
    read_until(*trainer, 5500);  // this reading is lost
  }
  {
    const auto trainer = open(o);
    EXPECT_TRUE(trainer->resumed());
    of_second = trainer->progress().done;
    EXPECT_GE(of_second, 2048u);
    EXPECT_LE(of_second, 4200u);
  }
  // The second save is at the first place, and the first save at the second.
  const auto spoil = [&](uint64_t at) {
    std::fstream file(state, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(at)).write("spoilt", 6);
  };
  spoil(std::filesystem::file_size(state) / 4);
  {
    const auto trainer = open(o);
    EXPECT_TRUE(trainer->resumed());
    of_first = trainer->progress().done;
    EXPECT_GT(of_first, 0u);
    EXPECT_LT(of_first, of_second);
  }
  spoil(std::filesystem::file_size(state) * 3 / 4);
  {
    const auto trainer = open(o);
    EXPECT_FALSE(trainer->resumed());
    EXPECT_EQ(trainer->progress().done, 0u);
  }
  EXPECT_EQ(trained(o, must(open_device("cpu", {.threads = 1}))), whole);
}

// All tokens are used, with any amount of memory.
TEST_F(Training, OfALinearOneTakesAsMuchMemoryForAnyNumberOfTexts) {
  TrainingOptions o = options("linear");
  o.kind = Retainer::Kind::kLinear;
  o.memory = 1;
  std::vector<uint64_t> missing;
  for (const uint32_t texts : {2u, 6u}) {
    o.texts = texts;
    for (o.memory = 1;;) {
      const auto tried = Trainer::create(small.model, cpu(), o);
      if (tried.ok()) break;
      ASSERT_EQ(tried.status().code(), Code::kBudget) << tried.status().message();
      ASSERT_GT(tried.status().bytes_missing(), 0u);
      o.memory += tried.status().bytes_missing();
    }
    std::filesystem::remove(o.output + ".partial");
    missing.push_back(o.memory);
  }
  EXPECT_EQ(missing[0], missing[1]);
  TrainingOptions roomy = o;
  roomy.output = folder.file("roomy");
  roomy.memory = 0;
  EXPECT_EQ(trained(o), trained(roomy));
}

TEST_F(Training, CountsSharesForARetainerThatIsThere) {
  TrainingOptions plain = options("plain");
  plain.equal_shares = true;
  finish(*open(plain));
  EXPECT_TRUE(retainer(plain.output)->shares.empty());
  TrainingOptions o = options("shared");
  o.heads = plain.output;
  const auto sharing = open(o);
  finish(*sharing);
  const std::vector<float> shares = sharing->shares();
  const auto shared = retainer(o.output);
  EXPECT_EQ(shared->shares, sharing->shares_help() ? shares : std::vector<float>());
  // The shares equal those that training itself counts for the same texts.
  const auto counting = open(options("counted"));
  finish(*counting);
  EXPECT_EQ(shares, counting->shares());
  // Half of the pools is divided equally, and the rest in proportion to integer counts. With four heads and
  // two texts of 1,024 tokens, the counts are of a quarter of the entries, 512 per head on average. A share
  // is below 4 and off by at most 2^-23, so a count is off by 1,024 times that.
  float sum = 0;
  for (const float share : shares) {
    sum += share;
    const double count = (share - 0.5) / 0.5 * 512;
    EXPECT_NEAR(count, std::round(count), 1.3e-4) << share;
  }
  EXPECT_NEAR(sum, 4, 1e-4);
  EXPECT_NE(shares, std::vector<float>(4, 1));
  // Nothing else changed.
  EXPECT_EQ(shared->layers.size(), 2u);
  const auto before = retainer(plain.output);
  for (uint32_t i = 0; i < 2; ++i)
    EXPECT_EQ(
        std::memcmp(shared->layers[i].fc1.data, before->layers[i].fc1.data, before->layers[i].fc1.bytes()),
        0);
}

TEST_F(Training, IsRefusedInASentence) {
  const auto expect = [&](const char* what, const auto& change, Code code, const char* word) {
    TrainingOptions o = options("refused");
    change(o);
    const auto refused = Trainer::create(small.model, cpu(), o);
    ASSERT_FALSE(refused.ok()) << what;
    EXPECT_EQ(refused.status().code(), code) << refused.status().message();
    EXPECT_NE(refused.status().message().find(word), std::string::npos) << refused.status().message();
  };
  expect(
      "no data", [](TrainingOptions& o) { o.data.clear(); }, Code::kInvalidArgument, "--data");
  expect(
      "no output", [](TrainingOptions& o) { o.output.clear(); }, Code::kInvalidArgument, "-o");
  expect(
      "no texts", [](TrainingOptions& o) { o.texts = 0; }, Code::kInvalidArgument, "1 text");
  expect(
      "a sink of logits",
      [](TrainingOptions& o) {
        o.kind = Retainer::Kind::kSink;
        o.target = Target::kMaxLogit;
      },
      Code::kUnsupported, "is not a share");
  expect(
      "a file that is there", [&](TrainingOptions& o) { o.output = book; }, Code::kIo, "exists already");
  expect(
      "no such heads", [](TrainingOptions& o) { o.heads = "/no such file"; }, Code::kIo, "no such file");
}

}  // namespace
}  // namespace thimble::test
