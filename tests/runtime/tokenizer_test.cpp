#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>

#include "tests/support/data.h"
#include "tests/support/gguf_writer.h"
#include "text/encoder.h"
#include "text/pretokenizer.h"
#include "text/utf8.h"

namespace thimble {
namespace {

// A tokenizer and the file that contains its texts.
struct Loaded {
  FileBytes bytes;
  MappedFile file;
  Tokenizer tokenizer;

  explicit Loaded(const GgufWriter& writer) : bytes(writer.bytes()), file(lend(bytes)) { load("test"); }
  explicit Loaded(const std::string& path) {
    auto opened = MappedFile::open(path);
    EXPECT_TRUE(opened.ok()) << opened.status().message();
    if (opened.ok()) file = std::move(*opened);
    load(path);
  }

 private:
  void load(const std::string& name) {
    const auto gguf = Gguf::parse(file, name);
    ASSERT_TRUE(gguf.ok()) << gguf.status().message();
    auto loaded = Tokenizer::load(*gguf);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    tokenizer = std::move(*loaded);
  }
};

Status load_error(const GgufWriter& writer) {
  const FileBytes bytes = writer.bytes();
  const MappedFile file = lend(bytes);
  const auto gguf = Gguf::parse(file, "test.gguf");
  EXPECT_TRUE(gguf.ok()) << gguf.status().message();
  const auto loaded = Tokenizer::load(*gguf);
  return loaded.status();
}

std::string read(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<int32_t> ids(const std::vector<Token>& tokens) {
  std::vector<int32_t> out;
  for (const Token& t : tokens) out.push_back(t.id);
  return out;
}
std::vector<int32_t> ids(const Tokenizer& t, std::string_view text, bool parse_special = false) {
  return ids(t.tokenize(text, false, parse_special));
}

std::string back(const Tokenizer& t, const std::vector<int32_t>& tokens, bool special = false) {
  return t.detokenize(tokens.data(), tokens.size(), special);
}

// Checks that offsets ascend and are inside the text, and that each token's own bytes equal the text there.
// The tokens do not include BOS.
void expect_offsets(const Tokenizer& t, std::string_view text, const std::vector<Token>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    const uint64_t end = i + 1 < tokens.size() ? tokens[i + 1].offset : text.size();
    ASSERT_LE(tokens[i].offset, end) << i;
    ASSERT_LE(end, text.size());
    std::string piece;
    t.append_piece(tokens[i].id, false, piece);
    const std::string_view there = text.substr(tokens[i].offset, end - tokens[i].offset);
    // The space that the tokenizer prepended.
    if (i == 0 && piece.size() == there.size() + 1) piece.erase(0, 1);
    ASSERT_EQ(piece, there) << i;
  }
}

// The pieces as one readable text.
std::string pieces(const char* scheme, std::string_view text) {
  std::string out;
  const PreTokenizer* found = find_pre_tokenizer(scheme);
  if (!found) return "no such scheme";
  Splitter(*found).split(text,
                         [&](std::string_view piece) { out.append(out.empty() ? "" : "|").append(piece); });
  return out;
}

// A vocabulary of all bytes, and some merged letters: "ab", "abc", " a", and those that each test adds.
GgufWriter small_bpe() {
  GgufWriter w;
  std::vector<std::string> tokens;
  for (int b = 0; b < 256;
       ++b) {  // the bytes as byte-level BPE spells them, computed in another way than in the library
    static int extra = 0x100;
    if (b == 0) extra = 0x100;
    const bool shown = (b > 32 && b < 127) || (b > 160 && b != 173);
    const int c = shown ? b : extra++;
    tokens.push_back(c < 128
                         ? std::string(1, static_cast<char>(c))
                         : std::string{static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 63))});
  }
  for (const char* t : {"ab", "abc", "\u0120a", "<|im_end|>", "<|x|>", "<|x|>>", "[user]"})
    tokens.push_back(t);
  std::vector<int32_t> types(tokens.size(), 1);
  types[259] = types[260] = types[261] = 3;
  types[262] = 4;
  w.set("general.architecture", "llama")
      .set("tokenizer.ggml.model", "gpt2")
      .set("tokenizer.ggml.pre", "gpt-2");
  w.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.token_type", types);
  w.set("tokenizer.ggml.merges", std::vector<std::string>{"a b", "ab c", "\u0120 a"});
  return w.set("tokenizer.ggml.bos_token_id", 260u);
}

// A vocabulary of the letter "a" and then these texts, all of them user-defined.
GgufWriter vocabulary_of(std::vector<std::string> texts) {
  texts.insert(texts.begin(), "a");
  GgufWriter w;
  w.set("general.architecture", "llama").set("tokenizer.ggml.model", "gpt2");
  w.set("tokenizer.ggml.pre", "gpt-2").set("tokenizer.ggml.merges", std::vector<std::string>{});
  w.set("tokenizer.ggml.token_type", std::vector<int32_t>(texts.size(), 4));
  return w.set("tokenizer.ggml.tokens", texts);
}

GgufWriter small_spm(const char* user_defined = nullptr) {
  GgufWriter w;
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>"};
  std::vector<int32_t> types = {2, 3, 3};
  std::vector<float> scores = {0, 0, 0};
  for (int b = 0; b < 256; ++b) {
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", static_cast<unsigned>(b));
    tokens.push_back(text);
    types.push_back(6);
    scores.push_back(0);
  }
  float score = 0;
  for (const char* t : {"\u2581a", "ab", "bc", "\u2581", "a", "b", "c", "<", "s", ">", "<s"}) {
    tokens.push_back(t);
    types.push_back(1);
    scores.push_back(--score);
  }
  if (user_defined) {
    tokens.push_back(user_defined);
    types.push_back(4);
    scores.push_back(0);
  }
  w.set("general.architecture", "llama").set("tokenizer.ggml.model", "llama");
  w.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.token_type", types);
  return w.set("tokenizer.ggml.scores", scores);
}

// Vocabularies trained on the demo's book, texts and their ids, from make_vocabularies.py.
const nlohmann::json& reference() {
  static const auto all = nlohmann::json::parse(read(project_file("tests/reference/vocabularies.json")));
  return all;
}

// The element of `list` whose value of `key` is `name` or contains it.
const nlohmann::json& named(const nlohmann::json& list, const char* key, const std::string& name) {
  const auto found = std::find_if(list.begin(), list.end(), [&](const nlohmann::json& element) {
    const nlohmann::json& names = element.at(key);
    return names == name || std::find(names.begin(), names.end(), name) != names.end();
  });
  if (found == list.end()) throw std::runtime_error("make_vocabularies.py does not know '" + name + "'");
  return *found;
}

GgufWriter trained_bpe(const std::string& pre) {
  const nlohmann::json& bpe = reference().at("bpe");
  GgufWriter w;
  w.set("general.architecture", "llama").set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", pre);
  w.set("tokenizer.ggml.tokens", bpe.at("tokens").get<std::vector<std::string>>());
  return w.set("tokenizer.ggml.merges", bpe.at("merges").get<std::vector<std::string>>());
}

GgufWriter trained_spm(const std::string& name) {
  const nlohmann::json& spm = named(reference().at("sentencepiece"), "name", name);
  GgufWriter w;
  w.set("general.architecture", "llama").set("tokenizer.ggml.model", "llama");
  w.set("tokenizer.ggml.tokens", spm.at("tokens").get<std::vector<std::string>>());
  w.set("tokenizer.ggml.scores", spm.at("scores").get<std::vector<float>>());
  w.set("tokenizer.ggml.token_type", spm.at("types").get<std::vector<int32_t>>());
  return w.set("tokenizer.ggml.add_space_prefix", spm.at("add_space_prefix").get<bool>());
}

// The pre-tokenizers of byte-level vocabularies.
std::vector<std::string> byte_level_pre_tokenizers() {
  std::vector<std::string> names = pre_tokenizer_names();
  std::erase_if(names, [](const std::string& name) { return find_pre_tokenizer(name)->flags & kRaw; });
  return names;
}

// The reference data of a pre-tokenizer.
const nlohmann::json& scheme(const std::string& pre) {
  return named(reference().at("bpe").at("schemes"), "names", pre);
}

// The texts of the reference, including those that are not UTF-8.
std::vector<std::string> reference_texts() {
  auto texts = reference().at("texts").get<std::vector<std::string>>();
  for (const auto& broken : reference().at("broken").get<std::vector<std::vector<uint8_t>>>())
    texts.emplace_back(broken.begin(), broken.end());
  return texts;
}

const char* const kSentencePieces[] = {"words", "across-words"};

void expect_ids(const Tokenizer& t, const std::string& text, const std::vector<int32_t>& expected) {
  const std::vector<Token> tokens = t.tokenize(text, false, false);
  EXPECT_EQ(ids(tokens), expected) << testing::PrintToString(text);
  EXPECT_EQ(back(t, expected), text);
  expect_offsets(t, text, tokens);
}

void expect_any_bytes_come_back(const Tokenizer& t) {
  std::string lacking;  // bytes without a token, which no assigned character has
  for (int b = 0; b < 256; ++b) {
    const std::string byte(1, static_cast<char>(b));
    if (!t.tokenize(byte, false, false).empty()) continue;
    lacking += byte;
    EXPECT_TRUE(b == 0xC0 || b == 0xC1 || b >= 0xF1) << b;
  }
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::string text(random() % 200, '\0');
    for (char& c : text)
      c = static_cast<char>(i % 2 ? random() : " \na1'\xC3\xA9\xE2\x96\xF0\x9F\x80\xFF"[random() % 14]);
    std::erase_if(text, [&](char c) { return lacking.find(c) != std::string::npos; });
    // SentencePiece cannot tell U+2581 from a space.
    for (size_t at; (at = text.find("\u2581")) != std::string::npos;) text[at] = '_';
    const std::vector<Token> tokens = t.tokenize(text, false, false);
    ASSERT_EQ(back(t, ids(tokens)), text) << i;
    expect_offsets(t, text, tokens);
  }
}

// Processor time of tokenising `text`, in seconds.
double time_to_tokenize(const Tokenizer& t, const std::string& text) {
  const std::clock_t begin = std::clock();
  const std::vector<Token> tokens = t.tokenize(text, false, false);
  const double seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_EQ(back(t, ids(tokens)), text);
  return seconds;
}

// Checks that a text four times as long takes four times as long. With merging in quadratic time it would
// take sixteen times as long. A factor of eight, plus a tenth of a second for other work of the machine,
// separates the two at any speed.
void expect_linear_time(const Tokenizer& t) {
  std::string prose = read(project_file("models/demo-book.txt"));
  while (prose.size() < 1'000'000) prose += prose;
  prose.resize(1'000'000);
  for (const std::string& text : {std::string(1'000'000, 'a'), std::string(1'000'000, ' '), prose}) {
    const double quarter = time_to_tokenize(t, text.substr(0, 250'000));
    EXPECT_LT(time_to_tokenize(t, text), 8 * quarter + 0.1);
  }
}

// Phi-3's marks remove the white space after them, in every vocabulary.
void expect_marks_strip(const Tokenizer& t) {
  std::vector<int32_t> expected = {t.bos(), t.find("<|user|>")};
  for (const int32_t id : ids(t, "Hello")) expected.push_back(id);
  for (const char* mark : {"<|end|>", "<|assistant|>"}) expected.push_back(t.find(mark));
  const std::vector<Token> tokens = t.tokenize("<|user|>\nHello<|end|>\n<|assistant|>\n", true, true);
  EXPECT_EQ(ids(tokens), expected);
  EXPECT_EQ(tokens[2].offset, 9u);
}

TEST(TrainedVocabulary, GivesTheIdsOfTheReferenceForEveryPreTokenizerAndDecodesThem) {
  const std::vector<std::string> texts = reference_texts();
  for (const std::string& pre : byte_level_pre_tokenizers()) {
    SCOPED_TRACE(pre);
    if (!scheme(pre).contains("ids")) continue;  // the test below covers how it splits
    const Loaded loaded(trained_bpe(pre));
    const auto expected = scheme(pre).at("ids").get<std::vector<std::vector<int32_t>>>();
    ASSERT_EQ(expected.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) expect_ids(loaded.tokenizer, texts[i], expected[i]);
  }
}

TEST(TrainedVocabulary, GivesTheIdsOfSentencePieceAndDecodesThem) {
  const auto texts = reference().at("texts").get<std::vector<std::string>>();
  for (const char* name : kSentencePieces) {
    SCOPED_TRACE(name);
    const Loaded loaded(trained_spm(name));
    const auto expected = named(reference().at("sentencepiece"), "name", name)
                              .at("ids")
                              .get<std::vector<std::vector<int32_t>>>();
    ASSERT_EQ(expected.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) expect_ids(loaded.tokenizer, texts[i], expected[i]);
  }
}

TEST(TrainedVocabulary, DecodesWhatItEncodesForAnyBytes) {
  for (const std::string& pre : byte_level_pre_tokenizers()) {
    SCOPED_TRACE(pre);
    expect_any_bytes_come_back(Loaded(trained_bpe(pre)).tokenizer);
  }
  for (const char* name : kSentencePieces) {
    SCOPED_TRACE(name);
    expect_any_bytes_come_back(Loaded(trained_spm(name)).tokenizer);
  }
}

TEST(TrainedVocabulary, TakesLinearTimeForOneLetterAndForProse) {
  expect_linear_time(Loaded(trained_bpe("gpt-2")).tokenizer);
  for (const char* name : kSentencePieces) {
    SCOPED_TRACE(name);
    expect_linear_time(Loaded(trained_spm(name)).tokenizer);
  }
}

// The ids that another runtime gives to 76 texts with every pre-tokenizer, with vocabularies made to show
// each split.
class SharedIds : public testing::Test {
 protected:
  using Ids = std::vector<std::vector<int32_t>>;

  static std::string path(const std::string& name) { return shared_file("data/" + name); }
  static std::string goldens() { return path("golden/pretokenizers.json"); }

  static nlohmann::json load() { return nlohmann::json::parse(read(goldens())); }

  static void expect(const nlohmann::json& texts, const nlohmann::json& ids_of_name,
                     const Tokenizer& tokenizer, const std::string& pre = "gpt-2") {
    const auto expected = ids_of_name.get<Ids>();
    ASSERT_EQ(texts.size(), expected.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      if (departs(pre, texts[i].get<std::string>())) continue;
      EXPECT_EQ(ids(tokenizer, texts[i].get<std::string>()), expected[i]) << i << ": " << texts[i];
    }
  }

  // Whether that runtime departs from the expressions published with the model for this text. This library
  // follows the published expressions, and CutsWhereThePublishedExpressionsDo tests similar texts.
  static bool departs(const std::string& pre, std::string_view text) {
    std::string patterns;
    for (const Pass& pass : find_pre_tokenizer(pre)->passes) patterns += pass.pattern ? pass.pattern : "";
    const auto has = [&](const char* part) { return patterns.find(part) != std::string::npos; };
    const std::set<std::string> without_case = {"kimi-k2", "tiny_aya", "cohere2moe", "youtu"};
    const std::vector<Char> chars = characters(text);
    return std::any_of(chars.begin(), chars.end(), [&](const Char c) {
      const auto is = static_cast<CharClass>(c.is);
      const bool capital = is == CharClass::kUpper || is == CharClass::kTitle, ascii = c.value < 128;
      // In that runtime, marks are not part of words, letters beyond ASCII have both cases, and in some
      // expressions all letters have both.
      if (has("\\p{Lu}") && (is == CharClass::kMark || (capital && (!ascii || without_case.count(pre))) ||
                             (is == CharClass::kLower && !ascii)))
        return true;
      // In that runtime, '~' is not a symbol, and no range contains white space beyond ASCII.
      return (has("\\p{S}") && c.value == '~') || (has("[\u4e00-") && is == CharClass::kSpace && !ascii);
    });
  }

  // Tests the vocabulary in `path` with each name in `part` as its pre-tokenizer.
  static void expect_pre_tokenizers(const nlohmann::json& texts, const nlohmann::json& part,
                                    const std::string& path) {
    size_t names = 0;
    for (const auto& [name, ids_or_name] : part.items()) {
      SCOPED_TRACE(name);
      ASSERT_TRUE(find_pre_tokenizer(name));
      GgufWriter w = copy_of_vocabulary(path);
      const Loaded loaded(w.set("tokenizer.ggml.pre", name));
      EXPECT_TRUE(loaded.tokenizer.warnings().empty());
      expect(texts, ids_or_name.is_string() ? part.at(ids_or_name.get<std::string>()) : ids_or_name,
             loaded.tokenizer, name);
      ++names;
    }
    EXPECT_EQ(names, 83u);
  }

  // Copies the keys that a tokenizer reads.
  static GgufWriter copy_of_vocabulary(const std::string& path) {
    GgufWriter w;
    const auto file = MappedFile::open(path);
    EXPECT_TRUE(file.ok()) << file.status().message();
    const auto gguf = Gguf::parse(*file, path);
    EXPECT_TRUE(gguf.ok()) << gguf.status().message();
    for (const auto& [key, value] : gguf->metadata()) {
      if (!key.starts_with("tokenizer.") && key != "general.architecture") continue;
      FileBytes bytes;
      if (value.is_array) {
        append(bytes, static_cast<uint32_t>(value.type));
        append(bytes, value.count);
      }
      append(bytes, value.bytes.data(), value.bytes.size());
      w.set(std::string(key), value.is_array ? GgufType::kArray : value.type, std::move(bytes));
    }
    return w;
  }

  // The merges of a file that was converted as BPE: each way to split a token into two tokens, for the best
  // token first.
  static std::vector<std::string> merges_of(const std::string& path) {
    const auto file = MappedFile::open(path);
    const auto gguf = Gguf::parse(*file, path);
    const auto tokens = **gguf->get_strings("tokenizer.ggml.tokens");
    const auto scores = **gguf->get_floats("tokenizer.ggml.scores");
    const std::set<std::string_view> known(tokens.begin(), tokens.end());
    std::vector<size_t> order(tokens.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    std::vector<std::string> merges;
    for (const size_t id : order)
      for (size_t at = 1; at < tokens[id].size(); ++at) {
        const std::string_view left = tokens[id].substr(0, at), right = tokens[id].substr(at);
        if (known.count(left) && known.count(right))
          merges.push_back(std::string(left) + " " + std::string(right));
      }
    return merges;
  }
};

TEST_F(SharedIds, AreGivenForEveryPreTokenizerOfGpt2sVocabulary) {
  THIMBLE_NEEDS(goldens());
  const nlohmann::json all = load();
  expect_pre_tokenizers(all.at("texts"), all.at("pre"), path("vocab/gpt-2.gguf"));
}

TEST_F(SharedIds, AreGivenForEveryPreTokenizerOfTheVocabularyThatShowsEachCut) {
  THIMBLE_NEEDS(goldens());
  const nlohmann::json all = load();
  expect_pre_tokenizers(all.at("texts"), all.at("probe").at("pre"), path("golden/pretok-probe.gguf"));
}

TEST_F(SharedIds, AreGivenBySentencePieceWithAndWithoutALeadingSpace) {
  THIMBLE_NEEDS(goldens());
  const nlohmann::json all = load();
  for (const bool adds : {false, true}) {
    SCOPED_TRACE(adds);
    GgufWriter w = copy_of_vocabulary(path("vocab/llama-spm.gguf"));
    const Loaded loaded(w.set("tokenizer.ggml.add_space_prefix", adds));
    expect(all.at("texts"), all.at("spm").at("pre").at(adds ? "true" : "false"), loaded.tokenizer);
  }
}

TEST_F(SharedIds, AreGivenByBpeThatIsNotOfBytes) {
  THIMBLE_NEEDS(goldens());
  const nlohmann::json all = load();
  for (const char* name : {"gemma4", "sarvam-moe"}) {
    SCOPED_TRACE(name);
    GgufWriter w = copy_of_vocabulary(path("vocab/llama-spm.gguf"));
    w.set("tokenizer.ggml.merges", merges_of(path("vocab/llama-spm.gguf")));
    w.set("tokenizer.ggml.model", std::string(name) == "gemma4" ? "gemma4" : "gpt2");
    const Loaded loaded(w.set("tokenizer.ggml.pre", name));
    expect(all.at("texts"), all.at("spm_bpe").at("pre").at(name), loaded.tokenizer);
  }
  const Loaded gemma4(path("golden/pretok-probe-gemma4.gguf"));
  EXPECT_TRUE(gemma4.tokenizer.adds_bos());
  expect(all.at("texts"), all.at("probe_gemma4").at("ids"), gemma4.tokenizer);
}

// Vocabularies of public models, with the ids that llama.cpp gives.
class PublicVocabulary : public testing::TestWithParam<const char*> {
 protected:
  std::string path() const { return shared_file(std::string("data/vocab/") + GetParam() + ".gguf"); }
};

TEST_P(PublicVocabulary, GivesTheIdsOfTheReferenceAndDecodesThem) {
  THIMBLE_NEEDS(path());
  const Loaded loaded(path());
  ASSERT_TRUE(loaded.tokenizer.ok());
  const std::string input = read(path() + ".inp");
  std::istringstream output(read(path() + ".out"));
  const std::string mark = "\n__ggml_vocab_test__\n";
  size_t texts = 0;
  for (size_t begin = 0; begin < input.size(); ++texts) {
    const size_t end = std::min(input.find(mark, begin), input.size());
    const std::string text = input.substr(begin, end - begin);
    begin = end + mark.size();
    std::string line;
    if (!std::getline(output, line)) break;
    std::istringstream numbers(line);
    expect_ids(loaded.tokenizer, text, {std::istream_iterator<int32_t>(numbers), {}});
  }
  EXPECT_GT(texts, 40u);
}

TEST_P(PublicVocabulary, DecodesWhatItEncodesForAnyBytes) {
  THIMBLE_NEEDS(path());
  expect_any_bytes_come_back(Loaded(path()).tokenizer);
}

TEST_P(PublicVocabulary, TakesLinearTimeForOneLetterAndForProse) {
  THIMBLE_NEEDS(path());
  expect_linear_time(Loaded(path()).tokenizer);
}

// Checks that a text that is given in pieces becomes the same tokens.
void expect_same_in_pieces(const Tokenizer& t, std::string_view text) {
  for (const bool parse_special : {false, true})
    for (const size_t size : {7, 64, 1000}) {
      std::vector<int32_t> found;
      std::string held;
      bool continues = false;
      const auto take = [&](size_t count) {
        if (count == 0) return;
        t.tokenize(
            std::string_view(held).substr(0, count), !continues, parse_special,
            [&](Token token) { found.push_back(token.id); }, continues);
        continues = true;
        held.erase(0, count);
      };
      for (size_t at = 0; at < text.size(); at += size) {
        held += text.substr(at, size);
        take(t.cut(held));
      }
      take(held.size());
      ASSERT_TRUE(found == ids(t.tokenize(text, true, parse_special))) << size;
    }
}

TEST_P(PublicVocabulary, GivesTheSameIdsInPieces) {
  THIMBLE_NEEDS(path());
  const Loaded loaded(path());
  std::string text = "</s><|end|> a <|endoftext|> b\n";
  for (const auto& one : reference().at("texts")) text += "Word " + one.get<std::string>() + "\nword\r\n";
  expect_same_in_pieces(loaded.tokenizer, text);
  EXPECT_EQ(loaded.tokenizer.cut("one two"), 3u);
  EXPECT_EQ(loaded.tokenizer.cut("one1 "), 0u);
}

TEST(Tokenizer, GivesTheSameIdsInPieces) {
  std::string text = "abc <|x|> a\n";
  for (const auto& one : reference().at("cut_texts")) text += "ab " + one.get<std::string>() + "\nab";
  const Loaded small(small_bpe()), pieces(small_spm());
  expect_same_in_pieces(small.tokenizer, text);
  expect_same_in_pieces(pieces.tokenizer, text);
  EXPECT_GT(small.tokenizer.cut(text), text.size() - 40);
}

// Gemma's vocabulary has tokens for runs of newlines, which are found as they are.
TEST(Tokenizer, IsCutBeforeNewlinesUnlessATokenContinuesThereFromALetter) {
  EXPECT_EQ(Loaded(small_spm("\n\n")).tokenizer.cut("ab\n\n1"), 2u);
  EXPECT_EQ(Loaded(small_spm("b\n")).tokenizer.cut("ab\n\n1"), 0u);
}

TEST(PreTokenizer, CutsAsGpt2Does) {
  EXPECT_EQ(pieces("gpt-2", "we'LL we'll"), "we|'|LL| we|'ll");
  EXPECT_EQ(pieces("gpt-2", "I've  been 'RE12a\n\n b!?  "), "I|'ve| | been| '|RE|12|a|\n\n| b|!?|  ");
  EXPECT_EQ(pieces("gpt-2", "a\u00a0\u3000b \u00e9t\u00e9 \u0663\u00bd"),
            "a|\u00a0|\u3000|b| \u00e9t\u00e9| \u0663\u00bd");
  EXPECT_EQ(pieces("gpt-2", "\t\tx"), "\t|\t|x");
  EXPECT_EQ(pieces("gpt-2", "a\xff\xfe b"), "a|\xff\xfe| b");
}

TEST(PreTokenizer, CutsAsLlama3AndQwen2Do) {
  EXPECT_EQ(pieces("llama-bpe", "I'VE 12345 x\t\tyou!\r\n\n z"), "I|'VE| |123|45| x|\t|\tyou|!\r\n\n| z");
  EXPECT_EQ(pieces("llama-bpe", "a  \n  \n   b   "), "a|  \n  \n|  | b|   ");
  EXPECT_EQ(pieces("llama-bpe", "\nx (y) \u4e2d\u6587\u3002"), "\n|x| (|y|)| \u4e2d\u6587|\u3002");
  EXPECT_EQ(pieces("qwen2", "a12 3"), "a|1|2| |3");
}

TEST(PreTokenizer, CutsAsStarcoderDoes) {
  EXPECT_EQ(pieces("starcoder", "x12 34's"), "x|1|2| |3|4|'s");
  EXPECT_EQ(pieces("smollm", "  12"), "  |1|2");
}

TEST(PreTokenizer, CutsAsDeepseekDoes) {
  EXPECT_EQ(pieces("deepseek-llm", "Hi there, 12\n\n\u4e2d\u6587a "),
            "Hi| there|,| |12|\n|\n|\u4e2d\u6587|a| ");
  // Georgian small letters are cased in Unicode, but not in the published list.
  EXPECT_EQ(pieces("deepseek-llm", "a\u10d0\u10d1 b\u2019"), "a|\u10d0\u10d1| b|\u2019");
}

TEST(PreTokenizer, CutsAtWhiteSpace) {
  EXPECT_EQ(pieces("whitespace", "Hi,  \u4e2d\u6587!\n1a"), "Hi,|  |\u4e2d\u6587!|\n|1a");
}

TEST(PreTokenizer, CutsAsTheDefaultDoes) {
  EXPECT_EQ(pieces("default", "a$+<b 12345, \u2014x`"), "a|$+<|b| |123|45|,| |\u2014|x|`");
}

TEST(PreTokenizer, CutsWordsOfManyScriptsAsTheModelsLearntThem) {
  // The splits of Python's module `regex` with the expressions published with o200k_base and tekken.
  struct Cuts {
    const char *text, *o200k, *tekken;
  };
  const Cuts all[] = {
      {"हिन्दी की छोटी कहानियाँ", "हिन्दी| की| छोटी| कहानियाँ", "हिन्दी| की| छोटी| कहानियाँ"},
      {"เรือลำเล็กที่ท่าน้ำ", "เรือลำเล็กที่ท่าน้ำ", "เรือลำเล็กที่ท่าน้ำ"},
      {"الْقَارِبُ الصَّغِيرُ، ٣٤٥٦", "الْقَارِبُ| الصَّغِيرُ|،| |٣٤٥|٦", "الْقَارِبُ| الصَّغِيرُ|،| |٣|٤|٥|٦"},
      {"Το ΚΑΡΑΒΙ φεύγειΤώρα", "Το| ΚΑΡΑΒΙ| φεύγει|Τώρα", "Το| ΚΑΡΑΒΙ| φεύγει|Τώρα"},
      {"уходитСейчас ЁЖ нЕТ", "уходит|Сейчас| ЁЖ| н|ЕТ", "уходит|Сейчас| ЁЖ| н|ЕТ"},
      {"IŞIK güzelÇiçek İyi'nin", "IŞIK| güzel|Çiçek| İyi|'nin", "IŞIK| güzel|Çiçek| İyi|'nin"},
      {"Vie\u0302\u0323t TIE\u0302\u0301NG", "Vie\u0302\u0323t| TIE\u0302\u0301|NG",
       "Vie\u0302\u0323t| TIE\u0302\u0301|NG"},
      {"ქალაქიᲐბა", "ქალაქი|Აბა", "ქალაქი|Აბა"},
      {"ǅungla NǅAaǅa", "ǅungla| NǅAa|ǅa", "ǅungla| NǅAa|ǅa"},
      {"한국어 \u1112\u1161\u11ab글", "한국어| \u1112\u1161\u11ab글", "한국어| \u1112\u1161\u11ab글"},
      {"👩\u200d🚀\ufe0fab 1\ufe0f\u20e3", "👩\u200d🚀\ufe0f|ab| |1|\ufe0f\u20e3",
       "👩\u200d🚀\ufe0f|ab| |1|\ufe0f\u20e3"},
      {"ÉcoLE's caféÀ it'\u017f 1234", "Éco|LE's| café|À| it'\u017f| |123|4",
       "Éco|LE|'s| café|À| it|'\u017f| |1|2|3|4"},
  };
  for (const Cuts& cuts : all) {
    for (const char* name :
         {"gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"})
      EXPECT_EQ(pieces(name, cuts.text), cuts.o200k) << name;
    EXPECT_EQ(pieces("tekken", cuts.text), cuts.tekken);
  }
}

TEST(PreTokenizer, CutsWhereThePublishedExpressionsDo) {
  std::vector<std::string> texts = reference_texts();
  for (const auto& text : reference().at("cut_texts")) texts.push_back(text.get<std::string>());
  for (const std::string& pre : pre_tokenizer_names()) {
    SCOPED_TRACE(pre);
    const auto expected = scheme(pre).at("pieces").get<std::vector<std::vector<size_t>>>();
    const Splitter splitter(*find_pre_tokenizer(pre));
    ASSERT_EQ(expected.size(), texts.size());
    for (size_t i = 0; i < texts.size(); ++i) {
      std::vector<size_t> sizes;
      splitter.split(texts[i], [&](std::string_view piece) { sizes.push_back(piece.size()); });
      EXPECT_EQ(sizes, expected[i]) << testing::PrintToString(texts[i]);
    }
  }
}

// A text that is processed in parts of any size has the same pieces, with every expression.
TEST(PreTokenizer, CutsTheSameInParts) {
  std::string text;
  for (const char* texts : {"texts", "cut_texts"})
    for (const auto& one : reference().at(texts)) {
      const auto words = one.get<std::string>();
      // The text has a word and then a space or a line end, after which a part may begin.
      for (const char* gap : {" ", "\n", "\r\n", "\n\n ", "  "}) text += "Word" + (gap + words);
    }
  const auto pieces_of = [&](const Splitter& splitter, size_t part) {
    std::vector<size_t> ends;
    splitter.split(
        text,
        [&](std::string_view piece) {
          ends.push_back(static_cast<size_t>(piece.data() + piece.size() - text.data()));
        },
        part);
    return ends;
  };
  for (const std::string& name : pre_tokenizer_names()) {
    const Splitter splitter(*find_pre_tokenizer(name));
    const auto whole = pieces_of(splitter, SIZE_MAX);
    for (const size_t part : {1, 50}) EXPECT_TRUE(pieces_of(splitter, part) == whole) << name << ' ' << part;
  }
}

TEST(PreTokenizer, TakesLinearTimeForAnyRun) {
  std::set<std::string> seen;
  for (const std::string& name : pre_tokenizer_names()) {
    std::string patterns;
    for (const Pass& pass : find_pre_tokenizer(name)->passes) patterns += pass.pattern ? pass.pattern : "";
    if (!seen.insert(patterns).second) continue;
    const Splitter splitter(*find_pre_tokenizer(name));
    for (const char* unit : {" ", "\n ", "a", "1", "!", "'", "\u4e2d", "\x80", "A", "A\u00e9", "a "}) {
      std::string text;
      while (text.size() < 300'000) text += unit;
      text += "1x";  // so that no run is at the end of its piece
      size_t total = 0;
      const std::clock_t begin = std::clock();
      splitter.split(text, [&](std::string_view piece) { total += piece.size(); });
      const double seconds = double(std::clock() - begin) / CLOCKS_PER_SEC;
      EXPECT_EQ(total, text.size());
      // This takes 5 ms here; trying each position separately would take 4e10 steps.
      EXPECT_LT(seconds, 5.0) << name << " with " << testing::PrintToString(unit);
    }
  }
}

TEST(Tokenizer, MergesByRankAndByScore) {
  const Loaded bpe(small_bpe());
  EXPECT_EQ(ids(bpe.tokenizer, "abcab"), (std::vector<int32_t>{257, 256}));
  EXPECT_EQ(ids(bpe.tokenizer, "bc ab"),
            (std::vector<int32_t>{'b', 'c', ' ', 256}));  // "a b" ranks before " a"
  const Loaded spm(small_spm());
  const Tokenizer& t = spm.tokenizer;
  EXPECT_EQ(ids(t, "abc"), (std::vector<int32_t>{t.find("\u2581a"), t.find("bc")}));
  EXPECT_EQ(ids(t, "cabc"), (std::vector<int32_t>{t.find("\u2581"), t.find("c"), t.find("ab"), t.find("c")}));
  EXPECT_EQ(ids(t, "a\u00e9"), (std::vector<int32_t>{t.find("\u2581a"), t.find("<0xC3>"), t.find("<0xA9>")}));
}

TEST(Tokenizer, MergesAsTakingTheFirstOfTheLowestCostDoes) {
  std::minstd_rand random(7);
  for (int round = 0; round < 100; ++round) {
    // 0 and 1 alternate, with some noise, and become 2 before any other merge. Each of these merges makes two
    // queued candidates obsolete and queues two more: together more than there is room for.
    std::vector<int32_t> naive;
    for (int i = 0; i < 400; ++i)
      naive.push_back(random() % 100 < static_cast<uint32_t>(round / 10) ? static_cast<int32_t>(random() % 3)
                                                                         : i % 2);
    constexpr int32_t kIds = 40;
    std::vector<Merge> merges(kIds * kIds, Merge{-1, 0});
    std::vector<uint32_t> costs(merges.size());
    std::iota(costs.begin(), costs.end(), 1);
    std::shuffle(costs.begin(), costs.end(), random);
    for (size_t i = 0; i < merges.size(); ++i) {
      const bool first = i / kIds <= 2 && i % kIds <= 2;
      if (first || random() % 3) merges[i] = {static_cast<int32_t>(3 + random() % (kIds - 3)), costs[i]};
    }
    merges[0 * kIds + 1] = {2, 0};
    const auto of = [&](int32_t left, int32_t right) {
      return merges[static_cast<size_t>(left * kIds + right)];
    };
    Merger merger;
    merger.clear(naive.size());
    for (const int32_t id : naive) merger.add(1, id);
    std::vector<int32_t> got;
    merger.run([&](const Symbol& left, const Symbol& right) { return of(left.id, right.id); },
               [&](const Symbol& s) { got.push_back(s.id); });
    for (;;) {
      Merge best{-1, UINT32_MAX};
      size_t at = 0;
      for (size_t i = 1; i < naive.size(); ++i) {
        const Merge m = of(naive[i - 1], naive[i]);
        if (m.id < 0 || m.cost >= best.cost) continue;
        best = m;
        at = i;
      }
      if (best.id < 0) break;
      naive[at - 1] = best.id;
      naive.erase(naive.begin() + static_cast<std::ptrdiff_t>(at));
    }
    ASSERT_EQ(got, naive) << round;
  }
}

TEST(Tokenizer, TakesAPieceWholeIfLlama3SaysSo) {
  GgufWriter w = small_bpe();
  w.set("tokenizer.ggml.merges", std::vector<std::string>{});
  EXPECT_EQ(ids(Loaded(w).tokenizer, "abc").size(), 3u);
  w.set("tokenizer.ggml.pre", "llama-bpe");
  EXPECT_EQ(ids(Loaded(w).tokenizer, "abc"), (std::vector<int32_t>{257}));
}

TEST(Tokenizer, ParsesControlTokensOnlyWhenAskedAndTheLongestWins) {
  const Loaded loaded(small_bpe());
  const Tokenizer& t = loaded.tokenizer;
  const std::string text = "a<|x|>>b<|x|>[user]<|";
  EXPECT_EQ(ids(t, text, true), (std::vector<int32_t>{'a', 261, 'b', 260, 262, '<', '|'}));
  for (int32_t id : ids(t, text))
    EXPECT_TRUE(id < 259 || id == 262) << id;  // user-defined tokens count as plain text
  EXPECT_EQ(t.tokenize(text, false, true)[4].offset, 13u);
  EXPECT_EQ(back(t, ids(t, text)), text);
  EXPECT_EQ(back(t, ids(t, text, true), true), text);
  EXPECT_EQ(back(t, ids(t, text, true), false), "ab[user]<|");
}

// Text that guard() marks becomes the tokens of plain text, next to control tokens that are parsed.
TEST(Tokenizer, KeepsGuardedTextAsTextWhenControlTokensAreParsed) {
  const Loaded small(small_bpe()), pieces(small_spm());
  for (const Tokenizer* t : {&small.tokenizer, &pieces.tokenizer}) {
    EXPECT_FALSE(t->guard("ab <|y|> [user] abc", false));
    for (const std::string text :
         {"<|im_end|>", "ab<|x|>>c <|im_end|>", "<<|x|>", "<|<|x|>|>", "a\uFDD0<|x|>", "</s><s>a [user]</s>",
          "<|im_end|><|im_end|>\n", "plain"}) {
      const std::string guarded = t->guard(text, false).value_or(text);
      EXPECT_EQ(ids(*t, guarded, true), ids(*t, text, false)) << text;
      const auto tokens = t->tokenize(guarded, false, true), alone = t->tokenize(text, false, false);
      ASSERT_EQ(tokens.size(), alone.size()) << text;
      for (size_t i = 0; i < tokens.size(); ++i)  // offsets refer to the given text, including marks
        EXPECT_EQ(guarded[tokens[i].offset], text[alone[i].offset]) << text << ' ' << i;
    }
  }
  const auto tokens = small.tokenizer.tokenize(
      "<|im_end|>a" + *small.tokenizer.guard("<|x|>b", false) + "c<|im_end|>", false, true);
  EXPECT_EQ(tokens.front().id, 259);
  EXPECT_EQ(tokens.back().id, 259);
  EXPECT_EQ(std::count_if(tokens.begin(), tokens.end(), [](Token t) { return t.id >= 259; }), 2);
}

TEST(Tokenizer, NeverMakesAControlTokenOfPlainText) {
  GgufWriter w = small_spm();  // "<s" and ">" are tokens, and so is their merge
  const Loaded loaded(w);
  EXPECT_EQ(ids(loaded.tokenizer, "<s>").back(), loaded.tokenizer.find(">"));
  EXPECT_EQ(ids(loaded.tokenizer, "<s>", true), (std::vector<int32_t>{1}));
  // A token that ends a generation counts as a control token, whatever its type in the file.
  GgufWriter b = small_bpe();
  std::vector<int32_t> types(263, 1);
  types[259] = 4;
  b.set("tokenizer.ggml.token_type", types);
  const Loaded bpe(b);
  EXPECT_EQ(ids(bpe.tokenizer, "<|im_end|>").size(), 10u);
  EXPECT_EQ(ids(bpe.tokenizer, "<|im_end|>", true), (std::vector<int32_t>{259}));
}

TEST(Tokenizer, AddsBosIfTheFileOrTheKindSaysSo) {
  GgufWriter bpe = small_bpe();
  EXPECT_FALSE(Loaded(bpe).tokenizer.adds_bos());
  EXPECT_TRUE(Loaded(bpe.set("tokenizer.ggml.pre", "llama-bpe")).tokenizer.adds_bos());
  EXPECT_FALSE(Loaded(bpe.set("tokenizer.ggml.add_bos_token", false)).tokenizer.adds_bos());
  bpe.set("tokenizer.ggml.add_bos_token", true);
  const Loaded adds(bpe);
  EXPECT_EQ(ids(adds.tokenizer.tokenize("a", true, false)), (std::vector<int32_t>{260, 'a'}));
  EXPECT_EQ(ids(adds.tokenizer.tokenize("", true, false)), (std::vector<int32_t>{260}));
  EXPECT_EQ(ids(adds.tokenizer.tokenize("a", false, false)), (std::vector<int32_t>{'a'}));
  EXPECT_FALSE(Loaded(bpe.erase("tokenizer.ggml.bos_token_id")).tokenizer.adds_bos());

  GgufWriter spm = small_spm();
  const Loaded by_kind(spm);
  EXPECT_EQ(by_kind.tokenizer.tokenize("a", true, false).front().id, 1);
  EXPECT_EQ(by_kind.tokenizer.eos(), 2);
  EXPECT_FALSE(Loaded(spm.set("tokenizer.ggml.add_bos_token", false)).tokenizer.adds_bos());
}

TEST(Tokenizer, AddsBosIfThePreTokenizerOfAFamilySaysSo) {
  const std::set<std::string> adds = {"lfm2", "falcon-h1", "tekken", "pixtral"};
  for (const char* pre : {"qwen2", "qwen35", "lfm2", "dbrx", "falcon-h1", "pixtral", "tekken", "deepseek-llm",
                          "deepseek-v3", "glm4", "kanana2", "gigachat", "youtu", "exaone4", "command-r",
                          "cohere2moe", "hunyuan-dense", "seed-coder", "minicpm5"}) {
    const Loaded loaded(small_bpe().set("tokenizer.ggml.pre", pre));
    EXPECT_TRUE(loaded.tokenizer.warnings().empty()) << pre;
    EXPECT_EQ(loaded.tokenizer.adds_bos(), adds.count(pre) > 0) << pre;
  }
}

// Without a key, <s> is BOS only in SentencePiece's vocabularies: it is an HTML tag in others.
TEST(Tokenizer, FindsBosByItsTextOnlyIfItIsUnambiguous) {
  EXPECT_EQ(Loaded(small_spm()).tokenizer.bos(), 1);
  const Loaded bpe(vocabulary_of({"<s>"}));
  EXPECT_EQ(bpe.tokenizer.bos(), -1);
  EXPECT_EQ(ids(bpe.tokenizer, "a<s>"), (std::vector<int32_t>{0, 1}));
}

TEST(Tokenizer, PutsASpaceBeforeTextAndRemovesItWhenDecoding) {
  GgufWriter w = small_spm();
  const Loaded with(w);
  const Tokenizer& t = with.tokenizer;
  EXPECT_EQ(ids(t, "a"), (std::vector<int32_t>{t.find("\u2581a")}));
  for (const char* text : {"a", " a", "  a ", "", " ", "<s>a</s> b<s>"}) {
    EXPECT_EQ(back(t, ids(t, text)), text);
    EXPECT_EQ(back(t, ids(t, text, true), true), text);
    EXPECT_EQ(back(t, ids(t.tokenize(text, true, false))), text);
  }
  const Loaded without(w.set("tokenizer.ggml.add_space_prefix", false));
  EXPECT_EQ(ids(without.tokenizer, "a"), (std::vector<int32_t>{t.find("a")}));
  EXPECT_EQ(back(without.tokenizer, ids(without.tokenizer, " a")), " a");
}

TEST(Tokenizer, MergesRawTextByRankAndTakesNewlinesWhole) {
  GgufWriter w = small_spm();
  std::vector<std::string> tokens = {"<bos>", "\u2581", "a",    "b",      "\u2581a",
                                     "ab",    "\n",     "\n\n", "<0xC3>", "<0xA9>"};
  w.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.model", "gemma4");
  w.set("tokenizer.ggml.token_type", std::vector<int32_t>{3, 1, 1, 1, 1, 1, 1, 1, 6, 6});
  w.set("tokenizer.ggml.merges", std::vector<std::string>{"a b", "\u2581 a"}).erase("tokenizer.ggml.scores");
  w.set("tokenizer.ggml.bos_token_id", 0u).set("tokenizer.ggml.add_bos_token", false);
  const Loaded loaded(w);
  const Tokenizer& t = loaded.tokenizer;
  const std::string text = "a ab a\n\n\u00e9\n";
  EXPECT_EQ(ids(t, text), (std::vector<int32_t>{2, 1, 5, 4, 7, 8, 9, 6}));
  EXPECT_EQ(back(t, ids(t, text)), text);
  expect_offsets(t, text, t.tokenize(text, false, false));
  EXPECT_TRUE(t.adds_bos());  // whatever the file says
}

TEST(Tokenizer, LosesTheWhiteSpaceBetweenWordsIfTheVocabularyHasNone) {
  GgufWriter w = vocabulary_of({"b", "ab", "\u4e2d", "a\u4e2d"});
  w.set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 1, 1, 1});
  w.set("tokenizer.ggml.merges", std::vector<std::string>{"a b", "a \u4e2d"});
  const Loaded loaded(w.set("tokenizer.ggml.pre", "whitespace"));
  EXPECT_EQ(ids(loaded.tokenizer, "ab  a\na\u4e2d b"), (std::vector<int32_t>{2, 0, 4, 1}));
}

TEST(Tokenizer, MergesAcrossWordsIfTheVocabularyDoes) {
  // With a token that contains a space, text must not be encoded word by word.
  GgufWriter w = small_spm();
  std::vector<std::string> tokens = {"<unk>", "<s>", "</s>", "\u2581", "a", "a\u2581", "a\u2581a"};
  w.set("tokenizer.ggml.tokens", tokens)
      .set("tokenizer.ggml.token_type", std::vector<int32_t>{2, 3, 3, 1, 1, 1, 1});
  w.set("tokenizer.ggml.scores", std::vector<float>{0, 0, 0, -5, -6, -1, -2});
  EXPECT_EQ(ids(Loaded(w).tokenizer, "a a"), (std::vector<int32_t>{3, 6}));
  // A space may also merge with a U+2581 in the text itself.
  tokens = {"<unk>", "<s>", "</s>", "\u2581", "a", "\u2581\u2581", "b"};
  w.set("tokenizer.ggml.tokens", tokens);
  EXPECT_EQ(ids(Loaded(w).tokenizer, "a\u2581 b"), (std::vector<int32_t>{3, 4, 5, 6}));
}

TEST(Tokenizer, StripsWhiteSpaceAfterTheMarksOfPhi3) {
  GgufWriter w = trained_spm("words");
  const nlohmann::json& spm = named(reference().at("sentencepiece"), "name", "words");
  auto tokens = spm.at("tokens").get<std::vector<std::string>>();
  auto types = spm.at("types").get<std::vector<int32_t>>();
  for (const char* mark : {"<|user|>", "<|end|>", "<|assistant|>"}) {
    tokens.push_back(mark);
    types.push_back(3);
  }
  w.set("tokenizer.ggml.tokens", tokens).set("tokenizer.ggml.token_type", types);
  w.set("tokenizer.ggml.scores", std::vector<float>(tokens.size()));
  const Loaded llama(w);
  EXPECT_NE(llama.tokenizer.tokenize("<|end|>\na", false, true)[1].offset, 8u);
  expect_marks_strip(Loaded(w.set("general.architecture", "phi3")).tokenizer);
}

TEST(Tokenizer, StripsWhiteSpaceAfterTheMarksOfThePublicPhi3) {
  const std::string path = shared_file("data/vocab/phi-3.gguf");
  THIMBLE_NEEDS(path);
  expect_marks_strip(Loaded(path).tokenizer);
}

TEST(Tokenizer, CountsTheTokensOfTheDemonstrationsBook) {
  const Loaded loaded(project_file("models/thimble-demo-28m-q8_0.gguf"));
  const Tokenizer& t = loaded.tokenizer;
  const std::string book = read(project_file("models/demo-book.txt"));
  const std::vector<Token> tokens = t.tokenize(book, true, false);
  EXPECT_EQ(tokens.size(), 57'004u);  // the count of another implementation
  EXPECT_EQ(back(t, ids(tokens)), book);
  EXPECT_TRUE(t.adds_bos());
  EXPECT_EQ(t.eos(), t.find("<|end|>"));
  EXPECT_TRUE(t.ends_generation(t.find("<|end|>")) && t.ends_generation(t.find("<|endoftext|>")));
}

TEST(Tokenizer, KnowsWhatEndsAGeneration) {
  using Texts = std::vector<std::string>;
  struct Family {
    const char* name;
    Texts vocabulary;
    const char* eos;  // as given in its files
    Texts ends;
  };
  const Family families[] = {
      {"gemma2, gemma3",
       {"<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "</s>"},
       "<eos>",
       {"<eos>", "<end_of_turn>", "</s>"}},
      {"gemma4",
       {"<eos>", "<|turn>", "<turn|>", "<|tool_response>", "<tool_response|>", "</s>"},
       "<eos>",
       {"<eos>", "<turn|>", "<|tool_response>"}},
      {"gpt-oss",
       {"<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
        "<|call|>"},
       "<|return|>",
       {"<|endoftext|>", "<|return|>", "<|call|>"}},
      {"solar-open", {"<|flush|>", "<|calls|>", "<|end|>", "<|begin|>"}, nullptr, {"<|flush|>", "<|calls|>"}},
      {"qwen",
       {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>",
        "<|file_sep|>"},
       "<|im_end|>",
       {"<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}},
      {"smollm3",
       {"<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"},
       "<|im_end|>",
       {"<|im_end|>", "<|end_of_text|>"}},
      {"granite",
       {"<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<fim_pad>", "<reponame>"},
       "<|end_of_text|>",
       {"<|end_of_text|>", "<fim_pad>", "<reponame>"}},
      {"olmo2",
       {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
       "<|endoftext|>",
       {"<|endoftext|>", "<|im_end|>"}},
      {"phi-4-mini", {"<|endoftext|>", "<|user|>", "<|end|>"}, "<|endoftext|>", {"<|endoftext|>", "<|end|>"}},
      {"mistral", {"<unk>", "<s>", "</s>", "[INST]", "[/INST]"}, "</s>", {"</s>"}},
      {"lfm2",
       {"<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call_end|>"},
       "<|im_end|>",
       {"<|endoftext|>", "<|im_end|>"}},
      {"falcon-h1",
       {"<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"},
       "<|end_of_text|>",
       {"<|end_of_text|>", "<|im_end|>"}},
      {"deepseek",
       {"<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<\uff5cUser\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"},
       "<\uff5cend\u2581of\u2581sentence\uff5c>",
       {"<\uff5cend\u2581of\u2581sentence\uff5c>"}},
      {"cohere2",
       {"<EOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|END_ACTION|>"},
       "<|END_OF_TURN_TOKEN|>",
       {"<|END_OF_TURN_TOKEN|>"}},
      {"exaone4", {"[|user|]", "[|endofturn|]"}, "[|endofturn|]", {"[|endofturn|]"}},
      {"seed-oss", {"<seed:bos>", "<seed:eos>", "<seed:think>"}, "<seed:eos>", {"<seed:eos>"}},
      {"llama3",
       {"<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
       "<|eot_id|>",
       {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}},
      {"a mark that only the file knows", {"<|fine|>", "<|end"}, "<|fine|>", {"<|fine|>"}},
      {"one of several for one purpose", {"[PAD]", "<fim_pad>", "<PAD>"}, nullptr, {"<fim_pad>"}},
      {"return without call", {"<|return|>", "<|end|>"}, nullptr, {"<|return|>", "<|end|>"}},
      {"call without return", {"<|call|>", "<|end|>"}, nullptr, {"<|call|>", "<|end|>"}},
      {"return and calls", {"<|return|>", "<|calls|>", "<|end|>"}, nullptr, {"<|return|>", "<|calls|>"}},
      {"flush and call", {"<|flush|>", "<|call|>", "<|end|>"}, nullptr, {"<|flush|>", "<|call|>"}},
      {"an end between parts that the file calls eos",
       {"<|return|>", "<|call|>", "<|end|>"},
       "<|end|>",
       {"<|return|>", "<|call|>"}},
      {"</s> where nothing asks for tools", {"<turn|>", "</s>"}, nullptr, {"<turn|>", "</s>"}},
  };
  for (const Family& f : families) {
    SCOPED_TRACE(f.name);
    GgufWriter w = vocabulary_of(f.vocabulary);
    if (f.eos) {
      const auto eos = std::find(f.vocabulary.begin(), f.vocabulary.end(), f.eos) - f.vocabulary.begin();
      w.set("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(eos + 1));
    }
    const Loaded loaded(w);
    const Tokenizer& t = loaded.tokenizer;
    for (int32_t id = -1; id <= static_cast<int32_t>(t.size()); ++id) {
      const bool ends = std::find(f.ends.begin(), f.ends.end(), t.text(id)) != f.ends.end();
      EXPECT_EQ(t.ends_generation(id), ends) << t.text(id);
      // A token that ends an answer is a control token, whatever its type in the file: it is not shown, and
      // plain text does not become it.
      if (!ends) continue;
      EXPECT_EQ(back(t, {id}), "") << t.text(id);
      EXPECT_TRUE(ids(t, t.text(id)).empty() || ids(t, t.text(id))[0] != id) << t.text(id);
    }
  }
}

// The texts that end a generation in llama.cpp (src/llama-vocab.cpp, commit 00ad355e), with those of its
// tokens for padding, repositories and files; and other control tokens, which do not.
TEST(Tokenizer, EndsAGenerationAtTheTextsThatEndItInLlamaCpp) {
  for (const char* text : {"<|eot_id|>",
                           "<|im_end|>",
                           "<|end|>",
                           "<|return|>",
                           "<|call|>",
                           "<|flush|>",
                           "<|calls|>",
                           "<end_of_turn>",
                           "<|endoftext|>",
                           "</s>",
                           "<|eom_id|>",
                           "<EOT>",
                           "_<EOT>",
                           "[EOT]",
                           "[EOS]",
                           "<|end_of_text|>",
                           "<end_of_utterance>",
                           "<eos>",
                           "<turn|>",
                           "<|tool_response>",
                           "<｜end▁of▁sentence｜>",
                           "[e~[",
                           "<|fim_pad|>",
                           "<fim-pad>",
                           "<fim_pad>",
                           "<PAD>",
                           "[PAD]",
                           "<|fim_repo|>",
                           "<|repo_name|>",
                           "<fim-repo>",
                           "<REPO>",
                           "<reponame>",
                           "<|file_sep|>"}) {
    const Loaded loaded(vocabulary_of({text}));
    EXPECT_TRUE(loaded.tokenizer.ends_generation(1)) << text;
    EXPECT_FALSE(loaded.tokenizer.ends_generation(0)) << text;
  }
  for (const char* text : {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<PRE>", "<|im_start|>",
                           "<|start_header_id|>", "<|IM_END|>", "<s>", "<bos>", "[INST]", "<|channel|>"})
    EXPECT_FALSE(Loaded(vocabulary_of({text})).tokenizer.ends_generation(1)) << text;
}

TEST(Tokenizer, TakesTheEndsOfAKeyInsteadOfThoseByTheirText) {
  const std::vector<std::string> texts = {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
                                          "pad",         "repo",          "sep"};
  const char* keys[] = {"fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id"};
  for (int32_t i = 0; i < 3; ++i) {
    GgufWriter w = vocabulary_of(texts);
    const std::string key = std::string("tokenizer.ggml.") + keys[i];
    const Loaded named(w.set(key, 4 + i)), out_of_range(w.set(key, 1000));
    for (int32_t id = 1; id <= 6; ++id) {
      EXPECT_EQ(named.tokenizer.ends_generation(id), id == 4 + i || (id <= 3 && id != 1 + i)) << key << id;
      EXPECT_EQ(out_of_range.tokenizer.ends_generation(id), id <= 3) << key << id;
    }
  }
}

TEST(Tokenizer, TakesTheEndsThatKeysName) {
  GgufWriter w = small_bpe();
  w.set("tokenizer.ggml.eos_token_id", 261u).set("tokenizer.ggml.eot_token_id", 'z' + 0u);
  w.set("tokenizer.ggml.eom_token_id", 256u).set("tokenizer.ggml.fim_sep_token_id", 257u);
  const Loaded loaded(w);
  const Tokenizer& t = loaded.tokenizer;
  for (int32_t id : {256, 257, 259, 261, int{'z'}}) EXPECT_TRUE(t.ends_generation(id)) << id;
  for (int32_t id : {int{'a'}, 260, 262, -1, 1000}) EXPECT_FALSE(t.ends_generation(id)) << id;
  EXPECT_EQ(ids(t, "z"), (std::vector<int32_t>{'z'}));  // although this is the only way to write a z
  EXPECT_EQ(back(t, {'z'}), "z");
}

// GLM's answers end where the user or the result of a tool would follow.
TEST(Tokenizer, TakesTheMarksOfTheNextRoleAsEndsIfTheFileSaysSo) {
  GgufWriter w =
      vocabulary_of({"<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"});
  w.set("tokenizer.ggml.eos_token_id", 1u).set("tokenizer.ggml.eot_token_id", 3u);
  const Loaded loaded(w.set("tokenizer.ggml.eom_token_id", 5u));
  for (int32_t id = 0; id <= 5; ++id)
    EXPECT_EQ(loaded.tokenizer.ends_generation(id), id == 1 || id == 3 || id == 5) << id;
}

TEST(Tokenizer, ListsTheTokensThatTheFileSuppresses) {
  GgufWriter w = small_bpe();
  EXPECT_TRUE(Loaded(w).tokenizer.suppressed().empty());
  w.set("tokenizer.ggml.suppress_tokens", std::vector<int32_t>{261, 5, -1, 999});
  const Loaded loaded(w);
  EXPECT_EQ(loaded.tokenizer.suppressed(), (std::vector<int32_t>{261, 5}));
  ASSERT_EQ(loaded.tokenizer.warnings().size(), 1u);
  EXPECT_NE(loaded.tokenizer.warnings()[0].find("suppress_tokens is 999"), std::string::npos);
}

TEST(Tokenizer, TakesTheEndsThatAListNames) {
  GgufWriter w = small_bpe();
  w.set("tokenizer.ggml.eos_token_ids", std::vector<int32_t>{256, 261, -1, 999});
  const Loaded listed(w);
  EXPECT_EQ(listed.tokenizer.eos(), 256);  // if the file names none, the first of the list
  ASSERT_EQ(listed.tokenizer.warnings().size(), 1u);
  EXPECT_NE(listed.tokenizer.warnings()[0].find("eos_token_ids is 999"), std::string::npos);
  const Loaded both(w.set("tokenizer.ggml.eos_token_id", 257u));
  EXPECT_EQ(both.tokenizer.eos(), 257);
  for (int32_t id : {256, 257, 259, 261}) EXPECT_TRUE(both.tokenizer.ends_generation(id)) << id;
  for (int32_t id : {260, 262, -1, 999}) EXPECT_FALSE(both.tokenizer.ends_generation(id)) << id;
}

TEST(Tokenizer, ShowsTheMarksBetweenPartsOfAnAnswerAndNeverMakesThemFromPlainText) {
  const Loaded loaded(
      vocabulary_of({"<|return|>", "<|call|>", "<|end|>", "<|channel|>", "<|message|>", "<|start|>"}));
  const Tokenizer& t = loaded.tokenizer;
  for (const char* text : {"<|end|>", "<|channel|>", "<|message|>", "<|start|>"}) {
    EXPECT_EQ(back(t, {t.find(text)}), text);
    EXPECT_EQ(ids(t, text, true), (std::vector<int32_t>{t.find(text)}));
    for (const int32_t id : ids(t, text)) EXPECT_EQ(id, t.find("a")) << text;
  }
}

TEST(Tokenizer, FindsTheUnknownTokenInTextWhenSpecialOnesAreParsed) {
  const Loaded loaded(small_spm());
  EXPECT_EQ(ids(loaded.tokenizer, "<unk>", true), (std::vector<int32_t>{0}));
  EXPECT_NE(ids(loaded.tokenizer, "<unk>"), (std::vector<int32_t>{0}));
}

TEST(Tokenizer, WarnsOfAPreTokenizerThatIsNotKnownAndCutsTheDefaultWay) {
  const std::string text = "a$+<b 12345, x`";
  GgufWriter w = trained_bpe("default");
  const Loaded known(w);
  EXPECT_TRUE(known.tokenizer.warnings().empty());
  const auto warning_of = [&](const GgufWriter& writer) {
    const Loaded loaded(writer);
    EXPECT_EQ(ids(loaded.tokenizer, text), ids(known.tokenizer, text));
    EXPECT_EQ(loaded.tokenizer.warnings().size(), 1u);
    return loaded.tokenizer.warnings().empty() ? "" : loaded.tokenizer.warnings()[0];
  };
  EXPECT_NE(warning_of(w.set("tokenizer.ggml.pre", "unheard-of")).find("'unheard-of'"), std::string::npos);
  EXPECT_NE(warning_of(w.erase("tokenizer.ggml.pre")).find("tokenizer.ggml.pre"), std::string::npos);
}

TEST(Tokenizer, WarnsOfAnIdBeyondTheVocabularyAndIgnoresIt) {
  GgufWriter w = small_spm();
  const Loaded loaded(w.set("tokenizer.ggml.eos_token_id", 5000u));
  ASSERT_EQ(loaded.tokenizer.warnings().size(), 1u);
  EXPECT_NE(loaded.tokenizer.warnings()[0].find("eos_token_id is 5000"), std::string::npos);
  EXPECT_EQ(loaded.tokenizer.eos(), 2);  // as if the key were missing
}

TEST(Tokenizer, GivesPiecesWithinTheLengthItNames) {
  for (const GgufWriter& w : {small_bpe(), small_spm()}) {
    const Loaded loaded(w);
    const Tokenizer& t = loaded.tokenizer;
    uint32_t longest = 0;
    for (int32_t id = -2; id < static_cast<int32_t>(t.size()) + 2; ++id) {
      std::string piece;
      t.append_piece(id, true, piece);
      longest = std::max(longest, static_cast<uint32_t>(piece.size()));
    }
    EXPECT_EQ(longest, t.longest_piece());
  }
}

TEST(Tokenizer, RefusesDamagedVocabulariesWithASentence) {
  const auto refused = [](GgufWriter w, Code code, const std::string& names) {
    const Status status = load_error(w);
    EXPECT_EQ(status.code(), code) << names;
    EXPECT_NE(status.message().find(names), std::string::npos) << status.message();
  };
  refused(small_bpe().erase("tokenizer.ggml.model"), Code::kUnsupported, "tokenizer.ggml.model");
  refused(small_bpe().set("tokenizer.ggml.model", "bert"), Code::kUnsupported, "'bert'");
  refused(small_bpe().erase("tokenizer.ggml.tokens"), Code::kFormat, "tokens");
  refused(small_bpe().set("tokenizer.ggml.tokens", std::vector<std::string>{}), Code::kFormat, "tokens");
  refused(small_bpe().set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 2}), Code::kFormat,
          "token_type");
  refused(small_bpe().erase("tokenizer.ggml.merges"), Code::kFormat, "merges");
  refused(small_bpe().set("tokenizer.ggml.bos_token_id", -7), Code::kFormat, "bos_token_id");
  refused(small_bpe().set("tokenizer.ggml.tokens", 5u), Code::kFormat, "tokens");
  refused(small_spm().erase("tokenizer.ggml.scores"), Code::kFormat, "scores");
  refused(small_spm().set("tokenizer.ggml.scores", std::vector<float>{1, 2, 3}), Code::kFormat, "scores");
  EXPECT_EQ(Loaded(small_bpe().set("tokenizer.ggml.bos_token_id", 0xFFFFFFFFu)).tokenizer.bos(), -1);
}

TEST(Tokenizer, EncodesWithAnyVocabularyItAccepts) {
  // Tests merges of empty texts, empty and duplicate tokens, missing bytes, scores that are not numbers, and
  // types that do not exist.
  GgufWriter bpe = small_bpe();
  bpe.set("tokenizer.ggml.merges", std::vector<std::string>{"", " ", "a", "a b", "a b", "b  ", "q q",
                                                            "nope b", "ab ", "a b c", "\xff \xfe"});
  EXPECT_EQ(ids(Loaded(bpe).tokenizer, "abqq"), (std::vector<int32_t>{256, 'q', 'q'}));

  GgufWriter holes = small_bpe();
  holes.set("tokenizer.ggml.tokens", std::vector<std::string>{"", "a", "a", "", "b", "ab", "\xff", "\u0120"});
  holes.set("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1, 3, 3, -5, 99, 6, 1})
      .erase("tokenizer.ggml.bos_token_id");
  const Loaded few(holes);
  EXPECT_EQ(ids(few.tokenizer, "a bzb\xff"), (std::vector<int32_t>{1, 7, 4, 4}));
  EXPECT_EQ(few.tokenizer.find(""), -1);

  GgufWriter spm = small_spm();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  spm.set("tokenizer.ggml.tokens",
          std::vector<std::string>{"<unk>", "a", "b", "ab", "ba", "", "<0xZZ>", "<0x41"});
  spm.set("tokenizer.ggml.scores", std::vector<float>{nan, nan, -1, nan, -INFINITY, 0, 0, INFINITY});
  spm.erase("tokenizer.ggml.token_type");
  const Loaded odd(spm);
  // "ba" scores -inf and still precedes "ab", whose score is not a number. Bytes without a token become
  // <unk>, once per byte.
  EXPECT_EQ(ids(odd.tokenizer, "babz"), (std::vector<int32_t>{0, 0, 0, 4, 2, 0}));
}

TEST(Tokenizer, KnowsWhichTokensHoldTheBytesOfACharacter) {
  GgufWriter w = small_spm();
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::vector<float> scores;
  for (int b = 0; b < 256; ++b) {  // only bytes: even a space has no other token
    char text[8];
    std::snprintf(text, sizeof text, "<0x%02X>", static_cast<unsigned>(b));
    tokens.push_back(text);
    types.push_back(6);
    scores.push_back(0);
  }
  w.set("tokenizer.ggml.tokens", tokens)
      .set("tokenizer.ggml.token_type", types)
      .set("tokenizer.ggml.scores", scores);
  const Loaded loaded(w);
  std::vector<uint64_t> offsets;
  for (const Token& t : loaded.tokenizer.tokenize("\u00e9 b", false, false)) offsets.push_back(t.offset);
  EXPECT_EQ(offsets, (std::vector<uint64_t>{0, 0, 0, 0, 1, 2, 2, 2, 3}));  // first U+2581, then the text
}

TEST(Tokenizer, KnowsNothingUntilItIsLoaded) {
  const Tokenizer t;
  EXPECT_FALSE(t.ok());
  EXPECT_TRUE(t.tokenize("a", true, true).empty());
  EXPECT_EQ(t.find("a"), -1);
  EXPECT_EQ(t.text(0), "");
  EXPECT_EQ(back(t, {0, 1}), "");
  EXPECT_FALSE(t.ends_generation(-1));
  EXPECT_EQ(t.host_bytes(), 0u);
}

TEST(Utf8, ReadsWhatIsValidAndNothingElse) {
  const auto first = [](std::string_view text) { return first_code_point(text).value; };
  EXPECT_EQ(first("\x7f"), 0x7Fu);
  EXPECT_EQ(first("\xc2\x80"), 0x80u);
  EXPECT_EQ(first("\xdf\xbf"), 0x7FFu);
  EXPECT_EQ(first("\xe0\xa0\x80"), 0x800u);
  EXPECT_EQ(first("\xed\x9f\xbf"), 0xD7FFu);
  EXPECT_EQ(first("\xef\xbf\xbf"), 0xFFFFu);
  EXPECT_EQ(first("\xf0\x90\x80\x80"), 0x10000u);
  EXPECT_EQ(first("\xf4\x8f\xbf\xbf"), 0x10FFFFu);
  for (const char* bad : {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xe2\x28"})
    EXPECT_EQ(first(bad), kInvalidUtf8) << testing::PrintToString(bad);
  for (const char* cut : {"\xc3", "\xe2\x96", "\xf0\x9f\xa6"}) EXPECT_EQ(first(cut), kPartialUtf8);
}

TEST(Utf8, StreamCutsAtWholeCodePointsWhereverItsBytesAreCut) {
  const std::string text = "a\u00e9\u2581\U0001F999z";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    Utf8Stream stream;
    std::string out;
    stream.push(text.substr(0, cut), out);
    EXPECT_EQ(text.substr(0, out.size()), out);
    EXPECT_TRUE(out.size() == text.size() || (text[out.size()] & 0xC0) != 0x80);
    EXPECT_LT(cut - out.size(), 4u);
    stream.push(text.substr(cut), out);
    stream.finish(out);
    EXPECT_EQ(out, text);
  }
}

TEST(Utf8, StreamReplacesWhatCanNeverBecomeACodePoint) {
  const auto through = [](std::string_view bytes) {
    Utf8Stream stream;
    std::string out;
    for (char c : bytes) stream.push({&c, 1}, out);
    stream.finish(out);
    return out;
  };
  EXPECT_EQ(through("a\xff"
                    "b"),
            "a\ufffd"
            "b");
  EXPECT_EQ(through("\xe2\x96z"), "\ufffdz");  // an incomplete code point: one U+FFFD for its valid part
  EXPECT_EQ(through("\xf0\x9f\xe2\x96\x81"), "\ufffd\u2581");
  EXPECT_EQ(through("\xed\xa0\x80"), "\ufffd\ufffd\ufffd");  // a surrogate
  EXPECT_EQ(through("x\xf0\x9f\xa6"), "x\ufffd");
}

INSTANTIATE_TEST_SUITE_P(, PublicVocabulary, testing::Values("gpt-2", "starcoder", "llama-spm", "phi-3"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace thimble
