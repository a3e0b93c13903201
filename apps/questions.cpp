// Implements `thimble run --questions` (see questions.h).
#include "apps/questions.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <optional>

#include "apps/generation.h"
#include "apps/saved_text.h"
#include "apps/sizes.h"

namespace app {

namespace {

struct Question {
  std::string text;
  Json answer, depth;  // null if the file has none
  std::optional<Prompt> prompt;
};

std::vector<Question> read_questions(const std::string& path) {
  Json file = Json::parse(read_file(path), nullptr, false);
  if (file.is_discarded()) throw Failure(THIMBLE_FORMAT, "'" + path + "' is not JSON");
  if (!file.is_array() || file.empty()) {
    throw Failure(THIMBLE_FORMAT, "'" + path + "' must be an array of {\"question\": ..., \"answer\": ...}");
  }
  std::vector<Question> questions;
  for (const Json& item : file) {
    const std::string where = "entry " + std::to_string(questions.size() + 1) + " of '" + path + "'";
    if (!item.is_object() || !item.contains("question") || !item["question"].is_string()) {
      throw Failure(THIMBLE_FORMAT, where + " has no \"question\"");
    }
    Question q{item["question"], item.value("answer", Json()), item.value("depth", Json()), {}};
    if (!q.answer.is_null() && !q.answer.is_string())
      throw Failure(THIMBLE_FORMAT, where + ": \"answer\" is not a string");
    if (!q.depth.is_null() && !q.depth.is_number())
      throw Failure(THIMBLE_FORMAT, where + ": \"depth\" is not a number");
    questions.push_back(std::move(q));
  }
  return questions;
}

// One cell of a row: without line breaks or other control characters, padded to `width` columns of code
// points.
std::string cell(std::string text, size_t width) {
  for (char& c : text) {
    if (c == '\n' || c == '\r' || c == '\t') c = ' ';
  }
  text = visible(text);
  size_t columns = 0;
  for (char c : text) columns += (static_cast<unsigned char>(c) & 0xC0) != 0x80;
  return columns < width ? text + std::string(width - columns, ' ') : text;
}

const char* verdict(const Json& correct) {
  return correct.is_null() ? "" : correct.get<bool>() ? "right" : "wrong";
}

}  // namespace

int ask_questions(const Settings& s, const Model& model, const LongText& book,
                  const std::string& questions_path, const std::string& session_path) {
  std::vector<Question> questions = read_questions(questions_path);
  // The tokens that all prompts have in common are read once. Each prompt keeps the ids that it would have
  // alone, so a question reads exactly those ids, regardless of where the tokenizer splits the text.
  uint64_t longest = 0, common = UINT64_MAX;
  for (Question& q : questions) {
    const auto write = [&](std::string_view text) {
      return prompt_text(s, model, join_question(text, q.text));
    };
    q.prompt.emplace(model, book, write, prompt_flags(s, model));
    longest = std::max(longest, q.prompt->size());
    common = std::min(common, questions.front().prompt->common(*q.prompt));
  }

  Progress progress;
  // A saved session is continued with other questions, so its options do not depend on them.
  const bool saves = !session_path.empty();
  const uint64_t known = saves ? 0 : longest;
  const Retention retention = choose_retention(s, model, known, saves ? 0 : 1);
  thimble_session_options options = session_options(s, model, retention, known);
  if (saves) options.max_new = 0;
  progress.attach(options);
  if (!saves) leave_room_for_clones(model, options, 1);
  const thimble_memory planned = plan(model, options);
  const uint64_t needed = planned.total + (saves ? 0 : clone_bytes(planned));
  if (planned.budget && needed > planned.budget)  // reported before the text is read, not after it
    throw Failure(THIMBLE_BUDGET,
                  "the budget of " + format_size(planned.budget) + " lacks " +
                      format_size(needed - planned.budget) +
                      ": the reading and the clone that a question takes need " + format_size(needed) +
                      "; choose a smaller --pool, or leave --pool out for the largest that fits",
                  needed - planned.budget);
  const thimble_model_info info = model_info(model);
  const uint64_t dense_bytes = planned.dense_bytes_per_token * longest;
  if (!s.json) {
    std::printf("budget            %s\n", planned.budget ? format_size(planned.budget).c_str() : "no limit");
    std::printf("pool              %s entries a head, room for %s in the largest\n",
                format_count(planned.pool).c_str(), format_count(planned.capacity).c_str());
    if (saves)
      std::printf("planned           %s for the reading, and then for each question\n",
                  format_size(planned.total).c_str());
    else
      std::printf("planned           %s for the reading, %s with the clone that a question takes\n",
                  format_size(planned.total).c_str(), format_size(needed).c_str());
    if (planned.store) std::printf("store             %s of memory\n", format_size(planned.store).c_str());
    if (planned.store_file)
      std::printf("store             a file of %s\n", format_size(planned.store_file).c_str());
    std::printf(
        "dense would need  %s of keys and values, and positions up to %s; the model was trained for %s\n\n",
        format_size(dense_bytes).c_str(), format_count(longest).c_str(),
        format_count(info.context_length).c_str());
    std::fflush(stdout);
  }

  const Session reading = create_session(model, options);
  const Prompt& first = *questions.front().prompt;
  const bool restores = saves && std::filesystem::exists(native_path(session_path));
  const uint64_t taken_up = restores ? take_up(reading, session_path, first, common) : 0;
  check_room(reading, options, longest);
  bool interrupted = false;
  {
    const Interruptible interruptible(reading);
    interrupted = !feed_prompt(reading, first, taken_up, common, progress);
  }
  if (saves) save_text(reading, session_path, first);
  const thimble_stats read = stats(reading);
  const double read_rate =
      read.prefill_seconds > 0 ? static_cast<double>(read.prefill_tokens) / read.prefill_seconds : 0;
  size_t question_width = 8, answer_width = 6;
  for (const Question& q : questions) {
    question_width = std::max(question_width, q.text.size());
    if (q.answer.is_string())
      answer_width = std::max(answer_width, q.answer.get_ref<const std::string&>().size());
  }
  if (!s.json && !interrupted) {
    std::printf("read %s of %s tokens once in %.1f s (%.0f tokens/s), kept %s of them at most in a head\n\n",
                format_count(read.prefill_tokens).c_str(), format_count(longest).c_str(),
                read.prefill_seconds, read_rate, format_count(read.entries).c_str());
    std::printf("%s  %s  %s         depth\n", cell("question", question_width).c_str(),
                cell("answer", answer_width).c_str(), cell("expected", answer_width).c_str());
    std::fflush(stdout);
  }

  Json rows = Json::array();
  size_t right = 0, judged = 0;
  uint64_t allocated = memory(reading).allocated, saturated = read.saturated;
  for (const Question& q : questions) {
    if (interrupted) break;
    const auto start = std::chrono::steady_clock::now();
    Session cloned;
    if (saves)
      restore_session(reading, session_path);
    else
      cloned = clone(reading);
    const Session& session = saves ? reading : cloned;
    call(thimble_session_set_sampler, session.get(), &s.sampler);
    const Interruptible interruptible(session);
    Answer answer;
    answer.finish = Finish::kInterrupted;
    if (read_prompt(session, *q.prompt, common, progress))
      answer = generate(model, session, s.predict, [](std::string_view) {});
    allocated = std::max(allocated, memory(session).allocated);
    saturated = std::max(saturated, stats(session).saturated);  // a clone continues its original's count
    interrupted = answer.finish == Finish::kInterrupted;
    if (interrupted) break;  // an incomplete answer is neither right nor wrong
    const std::string text(strip(answer.text));
    Json correct;
    if (q.answer.is_string()) {
      correct = text == strip(q.answer.get_ref<const std::string&>());
      ++judged;
      right += correct.get<bool>() ? 1 : 0;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (s.json) {
      rows.push_back({{"question", q.text},
                      {"answer", text},
                      {"expected", q.answer},
                      {"correct", correct},
                      {"depth", q.depth},
                      {"finish_reason", finish_name(answer.finish)},
                      {"seconds", seconds}});
    } else {
      const std::string expected = q.answer.is_string() ? q.answer.get<std::string>() : "";
      std::printf("%s  %s  %s  %-5s", cell(q.text, question_width).c_str(), cell(text, answer_width).c_str(),
                  cell(expected, answer_width).c_str(), verdict(correct));
      if (q.depth.is_number()) std::printf("  %5.2f", q.depth.get<double>());
      std::printf("\n");
      std::fflush(stdout);
    }
  }

  warn_of_saturated(saturated);
  if (s.json) {
    print_json(
        {{"budget_bytes", planned.budget},
         {"memory",
          {{"planned", memory_json(planned)},
           {"planned_with_clone", needed},
           {"allocated", allocated},
           {"pool", planned.pool},
           {"capacity", planned.capacity}}},
         {"dense",
          {{"bytes", dense_bytes}, {"positions", longest}, {"trained_positions", info.context_length}}},
         {"prompt_tokens", longest},
         {"restored_tokens", taken_up},
         {"prefill_seconds", read.prefill_seconds},
         {"prefill_tps", read_rate},
         {"entries", {{"seen", read.prefill_tokens}, {"kept", read.entries}, {"evicted", read.evicted}}},
         {"saturated", saturated},
         {"questions", rows},
         {"right", right},
         {"judged", judged},
         {"finish_reason", interrupted ? "interrupted" : "stop"},
         {"seed", s.seed}});
  } else if (!interrupted) {
    std::printf("\n");
    if (judged) std::printf("%zu of %zu right, ", right, judged);
    std::printf("%s allocated at most\n", format_size(allocated).c_str());
  }
  return interrupted ? kExitInterrupted : 0;
}

}  // namespace app
