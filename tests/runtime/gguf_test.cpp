// Tests what the GGUF reader accepts, and that it refuses everything else.
#include "gguf/gguf.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "tests/support/gguf_writer.h"

namespace thimble {
namespace {

Result<Gguf> parse(const FileBytes& bytes) { return Gguf::parse(lend(bytes), "m.gguf"); }
Status refused(const FileBytes& bytes) { return parse(bytes).status(); }

// A file with a key and a tensor of every kind.
GgufWriter small_file() {
  GgufWriter w;
  w.set("general.architecture", "llama").set("a.u8", uint8_t{200}).set("a.i8", int8_t{-5});
  w.set("a.u16", uint16_t{60000}).set("a.i16", int16_t{-300}).set("a.u32", 4000000000u).set("a.i32", -70000);
  w.set("a.u64", uint64_t{1} << 63).set("a.i64", int64_t{1} << 40).set("a.f32", 0.5f).set("a.f64", 0.1);
  w.set("a.bool", true).set("a.strings", std::vector<std::string>{"", "one", "zwei"});
  w.set("a.ints", std::vector<int32_t>{-1, 2}).set("a.floats", std::vector<float>{1.5f, -2.0f});
  w.tensor("f32", {4, 2}, std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7});
  w.tensor("q8_0", {32}, 8, FileBytes(34, std::byte{7}));
  return w;
}

void expect_message(const Status& status, Code code, const std::string& part) {
  EXPECT_EQ(code_name(status.code()), std::string(code_name(code))) << status.message();
  EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  EXPECT_EQ(status.message().find('\n'), std::string::npos);
}

TEST(Gguf, ReadsValuesOfEveryType) {
  const FileBytes bytes = small_file().bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok()) << g.status().message();
  EXPECT_EQ(**g->get_string("general.architecture"), "llama");
  EXPECT_EQ(**g->get_uint("a.u8"), 200u);
  EXPECT_EQ(**g->get_uint("a.u16"), 60000u);
  EXPECT_EQ(**g->get_uint("a.u32"), 4000000000u);
  EXPECT_EQ(**g->get_uint("a.u64"), uint64_t{1} << 63);
  EXPECT_EQ(**g->get_uint("a.i64"), uint64_t{1} << 40);
  EXPECT_EQ(**g->get_float("a.f32"), 0.5);
  EXPECT_EQ(**g->get_float("a.f64"), 0.1);
  EXPECT_TRUE(**g->get_bool("a.bool"));
  EXPECT_EQ(**g->get_strings("a.strings"), (std::vector<std::string_view>{"", "one", "zwei"}));
  EXPECT_EQ(**g->get_ints("a.ints"), (std::vector<int64_t>{-1, 2}));
  EXPECT_EQ(**g->get_floats("a.floats"), (std::vector<float>{1.5f, -2.0f}));
  EXPECT_EQ(*g->need_uint("a.u8"), 200u);
  EXPECT_EQ(g->metadata().size(), 15u);
}

TEST(Gguf, SaysThatAnAbsentKeyIsAbsent) {
  const FileBytes bytes = small_file().bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok());
  EXPECT_FALSE(g->get_uint("b")->has_value());
  EXPECT_FALSE(g->get_float("b")->has_value());
  EXPECT_FALSE(g->get_bool("b")->has_value());
  EXPECT_FALSE(g->get_string("b")->has_value());
  EXPECT_FALSE(g->get_strings("b")->has_value());
  EXPECT_FALSE(g->get_ints("b")->has_value());
  EXPECT_FALSE(g->get_floats("b")->has_value());
  expect_message(g->need_uint("b").status(), Code::kFormat, "m.gguf lacks the key 'b'");
  expect_message(g->need_float("b").status(), Code::kFormat, "'b'");
  expect_message(g->need_string("b").status(), Code::kFormat, "'b'");
  EXPECT_EQ(g->find("b"), nullptr);
  EXPECT_EQ(g->tensor("b"), nullptr);
}

TEST(Gguf, NamesAKeyOfTheWrongType) {
  const FileBytes bytes = small_file().bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok());
  expect_message(g->get_uint("a.f32").status(), Code::kFormat,
                 "key 'a.f32' is of type f32, where an integer");
  expect_message(g->get_uint("a.ints").status(), Code::kFormat, "key 'a.ints' is an array of i32");
  expect_message(g->get_uint("a.i8").status(), Code::kFormat, "key 'a.i8' is negative");
  expect_message(g->get_float("a.u8").status(), Code::kFormat, "'a.u8'");
  expect_message(g->get_bool("a.u8").status(), Code::kFormat, "'a.u8'");
  expect_message(g->get_string("a.strings").status(), Code::kFormat, "'a.strings'");
  expect_message(g->get_strings("general.architecture").status(), Code::kFormat, "'general.architecture'");
  expect_message(g->get_ints("a.u8").status(), Code::kFormat, "'a.u8'");
  expect_message(g->get_ints("a.floats").status(), Code::kFormat, "'a.floats'");
  expect_message(g->get_floats("a.ints").status(), Code::kFormat, "'a.ints'");
}

TEST(Gguf, PrintsValuesForPeople) {
  GgufWriter w = small_file();
  w.set("a.many", std::vector<uint8_t>(20, uint8_t{3})).set("a.none", std::vector<float>{});
  const FileBytes bytes = w.bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok());
  EXPECT_EQ(printed(*g->find("a.i8")), "-5");
  EXPECT_EQ(printed(*g->find("a.u64")), "9223372036854775808");
  EXPECT_EQ(printed(*g->find("a.f64")), "0.1");
  EXPECT_EQ(printed(*g->find("a.bool")), "true");
  EXPECT_EQ(printed(*g->find("a.strings")), "['', 'one', 'zwei']");
  EXPECT_EQ(printed(*g->find("a.many")), "[3, 3, 3, 3, 3, 3, 3, 3, ... 20 in all]");
  EXPECT_EQ(printed(*g->find("a.none")), "[]");
}

TEST(Gguf, QuotesHostileStringsAsPrintableText) {
  EXPECT_EQ(in_quotes("caf\xc3\xa9 \xf0\x9f\x98\x80"), "'caf\xc3\xa9 \xf0\x9f\x98\x80'");
  EXPECT_EQ(in_quotes("a\nb\x1b[2J\x7f"), "'a?b?[2J?'");
  EXPECT_EQ(in_quotes("\xff\xc0\xaf\xed\xa0\x80\xc2\x9b"), "'" + std::string(8, '?') + "'");
  EXPECT_EQ(in_quotes("\xe2\x82"), "'" + std::string(2, '?') + "'");
  EXPECT_EQ(in_quotes(std::string(200, 'x')), "'" + std::string(79, 'x') + "...'");
}

TEST(Gguf, ShowsTensorsWithTheirBytes) {
  const FileBytes bytes = small_file().bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok());
  ASSERT_EQ(g->tensors().size(), 2u);
  const GgufTensor* t = g->tensor("f32");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->dims, 2u);
  EXPECT_EQ(t->shape[0], 4u);
  EXPECT_EQ(t->shape[1], 2u);
  EXPECT_EQ(t->elements, 8u);
  EXPECT_EQ(t->bytes, 32u);
  EXPECT_EQ(reinterpret_cast<const float*>(t->data)[5], 5.0f);
  EXPECT_EQ(g->tensor("q8_0")->bytes, 34u);
  EXPECT_EQ(g->tensor("q8_0")->data[33], std::byte{7});
}

TEST(Gguf, RefusesAFileCutAtAnyByte) {
  const FileBytes bytes = small_file().bytes();
  for (size_t size = 0; size < bytes.size(); ++size) {
    const FileBytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    const Status status = refused(cut);
    ASSERT_EQ(status.code(), Code::kFormat) << "cut at byte " << size;
    ASSERT_EQ(status.message().rfind("m.gguf", 0), 0u) << status.message();
  }
}

TEST(Gguf, SaysWhereATruncatedFileEnds) {
  GgufWriter w;
  w.set("the.key", 7u).tensor("the tensor", {2}, std::vector<float>{1, 2});
  const FileBytes whole = w.bytes();
  const auto cut_at = [&](size_t size) {
    return refused(FileBytes(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)));
  };
  const size_t header = 24, key_name = header + 8 + 7, value = key_name + 8, tensor_name = value + 8 + 10,
               tensor = tensor_name + 4 + 8 + 4 + 8;
  expect_message(cut_at(0), Code::kFormat, "is empty");
  expect_message(cut_at(3), Code::kFormat, "too short to be a GGUF file");
  expect_message(cut_at(4), Code::kFormat, "ends inside the header");
  expect_message(cut_at(header - 1), Code::kFormat, "ends inside the header");
  expect_message(cut_at(header), Code::kFormat, "1 keys, more than fit");
  expect_message(cut_at(tensor_name), Code::kFormat, "ends inside the description of tensor 'the tensor'");
  expect_message(cut_at(tensor - 1), Code::kFormat, "ends inside the description of tensor 'the tensor'");
  expect_message(cut_at(tensor), Code::kFormat, "padding before the tensor data");
  expect_message(cut_at(whole.size() - 1), Code::kFormat, "tensor 'the tensor' is past the end");

  w.tensors.clear();
  const FileBytes keys = w.bytes();
  expect_message(refused(FileBytes(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(value - 1))),
                 Code::kFormat, "ends inside the value of key 'the.key'");
}

TEST(Gguf, RefusesWhatIsNotGguf) {
  FileBytes bytes = small_file().bytes();
  std::memcpy(bytes.data(), "<htm", 4);
  expect_message(refused(bytes), Code::kFormat, "is not a GGUF file: it begins with '<htm'");
}

TEST(Gguf, RefusesOtherVersions) {
  GgufWriter w = small_file();
  w.version = 1;
  expect_message(refused(w.bytes()), Code::kUnsupported,
                 "GGUF version 1, and only versions 2 and 3 can be read; convert the model again");
  w.version = 4;
  expect_message(refused(w.bytes()), Code::kUnsupported, "GGUF version 4, and only versions 2 and 3");
  w.version = 0;
  expect_message(refused(w.bytes()), Code::kUnsupported, "GGUF version 0");
  w.version = 0x03000000;
  expect_message(refused(w.bytes()), Code::kUnsupported, "big-endian");
}

TEST(Gguf, ReadsVersion2AsVersion3) {
  GgufWriter w = small_file();
  w.version = 2;
  const FileBytes bytes = w.bytes();
  const Result<Gguf> g = parse(bytes);
  ASSERT_TRUE(g.ok()) << g.status().message();
  EXPECT_EQ(**g->get_uint("a.u64"), uint64_t{1} << 63);
  EXPECT_EQ(g->tensors().size(), 2u);
}

// The files of a model that is split into parts, in memory.
class Parts {
 public:
  explicit Parts(const std::vector<GgufWriter>& writers) {
    for (const GgufWriter& w : writers) bytes_.push_back(w.bytes());
    for (size_t i = 0; i < bytes_.size(); ++i)
      files_.push_back({lend(bytes_[i]), "part-" + std::to_string(i + 1)});
  }
  Result<Gguf> parse() const { return Gguf::parse(files_); }
  const FileBytes& bytes(size_t part) const { return bytes_[part]; }

 private:
  std::vector<FileBytes> bytes_;
  std::vector<GgufFile> files_;
};
Status refused(const std::vector<GgufWriter>& writers) { return Parts(writers).parse().status(); }

GgufWriter six_tensors() {
  GgufWriter w;
  w.set("general.architecture", "llama");
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) w.tensor(name, {2}, {float(name[0]), 7});
  return w;
}

TEST(Gguf, JoinsThePartsOfAModelInAnyOrder) {
  std::vector<GgufWriter> writers = six_tensors().parts(3);
  std::swap(writers[0], writers[2]);
  const Parts parts(writers);
  const Result<Gguf> g = parts.parse();
  ASSERT_TRUE(g.ok()) << g.status().message();
  EXPECT_EQ(g->name(), "part-3");
  EXPECT_EQ(**g->get_string("general.architecture"), "llama");
  ASSERT_EQ(g->tensors().size(), 6u);
  for (const char* name : {"a", "b", "c", "d", "e", "f"}) {
    const GgufTensor* tensor = g->tensor(name);
    ASSERT_NE(tensor, nullptr) << name;
    float first;
    std::memcpy(&first, tensor->data, sizeof first);
    EXPECT_EQ(first, float(name[0]));
    const FileBytes& file = parts.bytes(2 - static_cast<size_t>(name[0] - 'a') / 2);
    EXPECT_TRUE(tensor->data > file.data() && tensor->data + tensor->bytes <= file.data() + file.size());
  }
}

TEST(Gguf, AcceptsAPartWithoutTensorsAndAModelInOnePart) {
  std::vector<GgufWriter> parts = six_tensors().parts(2);
  std::swap(parts[0].tensors, parts[1].tensors);
  for (const GgufWriter::Tensor& t : parts[1].tensors) parts[0].tensors.push_back(t);
  parts[1].tensors.clear();
  EXPECT_TRUE(Parts(parts).parse().ok()) << Parts(parts).parse().status().message();
  EXPECT_TRUE(parse(small_file().set("split.count", uint16_t{1}).bytes()).ok());
}

TEST(Gguf, RefusesPartsThatAreNotAllOfOneModel) {
  const std::vector<GgufWriter> three = six_tensors().parts(3), two = six_tensors().parts(2);
  expect_message(refused(three[0].bytes()), Code::kFormat,
                 "m.gguf is part 1 of 3 of a model; open it by its name, PREFIX-00001-of-00003.gguf");
  expect_message(refused({three[0], three[1]}), Code::kFormat,
                 "part-1 is part 1 of 3 of a model, and 2 files are given: give all parts of one model");
  expect_message(refused({three[0], three[2], three[2]}), Code::kFormat,
                 "part-2 and part-3 are both part 3 of 3 of a model");
  expect_message(refused({two[0], three[1]}), Code::kFormat, "part-2 is part 2 of 3 of a model, and 2 files");
  expect_message(refused({two[0], six_tensors()}), Code::kFormat, "part-2 is a whole model, and 2 files");
  std::vector<GgufWriter> bad = two;
  bad[1].set("split.no", uint16_t{2});
  expect_message(refused(bad), Code::kFormat, "part-2 is damaged: it says that it is part 3 of 2 of a model");
  bad = two;
  bad[1].tensor("a", {2}, {1, 2});
  expect_message(refused(bad), Code::kFormat, "tensor 'a' is in part-2 and in another part");
  bad = two;
  bad[1].tensor("g", {2}, {1, 2});
  expect_message(refused(bad), Code::kFormat, "part-1 announces 6 tensors, and its 2 parts hold 7");
  bad = two;
  bad[1].set("general.architecture", "llama");
  EXPECT_TRUE(Parts(bad).parse().ok()) << refused(bad).message();
  bad[1].set("general.architecture", "qwen2");
  expect_message(refused(bad), Code::kFormat, "part-1 and part-2 differ in the key 'general.architecture'");
}

TEST(Gguf, OpensAllPartsNextToTheNamedPart) {
  const std::string prefix = ::testing::TempDir() + "gguf_test-",
                    names[] = {prefix + "00001-of-00002.gguf", prefix + "00002-of-00002.gguf"};
  const std::vector<GgufWriter> parts = six_tensors().parts(2);
  for (size_t i = 0; i < 2; ++i) parts[i].write(names[i]);
  for (const std::string& name : names) {
    const auto files = open_gguf(name);
    ASSERT_TRUE(files.ok()) << files.status().message();
    ASSERT_EQ(files->size(), 2u);
    EXPECT_EQ((*files)[0].name, names[0]);
    const Result<Gguf> g = Gguf::parse(*files);
    ASSERT_TRUE(g.ok()) << g.status().message();
    EXPECT_EQ(g->tensors().size(), 6u);
  }
  std::remove(names[1].c_str());
  expect_message(open_gguf(names[0]).status(), Code::kIo, "part 2 of 2 of the model is missing: ");
  std::remove(names[0].c_str());
}

TEST(Gguf, TakesOtherNamesForThoseOfWholeModels) {
  for (const char* name :
       {"x-00000-of-00002.gguf", "x-00003-of-00002.gguf", "x-1-of-2.gguf", "x-00001-of-00002.bin",
        "x-0001a-of-00002.gguf", "-of-00002.gguf", "x-+0001-of-00002.gguf"}) {
    const std::string path = ::testing::TempDir() + name;
    small_file().write(path);
    const auto files = open_gguf(path);
    EXPECT_TRUE(files.ok() && files->size() == 1) << name;
    std::remove(path.c_str());
  }
}

TEST(Gguf, RefusesDuplicateKeysAndTensors) {
  GgufWriter w = small_file();
  w.keys.push_back(w.keys[1]);
  expect_message(refused(w.bytes()), Code::kFormat, "has the key 'a.u8' twice");
  w = small_file();
  w.tensors.push_back(w.tensors[0]);
  expect_message(refused(w.bytes()), Code::kFormat, "has the tensor 'f32' twice");
}

TEST(Gguf, RefusesCountsThatCannotBeTrue) {
  for (const size_t at : {size_t{8}, size_t{16}}) {
    FileBytes bytes = small_file().bytes();
    for (const uint64_t count : {UINT64_MAX, uint64_t{1} << 60, uint64_t{bytes.size()}}) {
      std::memcpy(bytes.data() + at, &count, sizeof count);
      expect_message(refused(bytes), Code::kFormat,
                     at == 8 ? "tensors, more than fit" : "keys, more than fit");
    }
  }
}

TEST(Gguf, RefusesStringsPastTheEnd) {
  for (const uint64_t length : {UINT64_MAX, uint64_t{1} << 62, uint64_t{10000}}) {
    GgufWriter w = small_file();
    FileBytes value;
    append(value, length);
    append(value, "text", 4);
    expect_message(refused(w.set("long.string", GgufType::kString, value).bytes()), Code::kFormat,
                   "ends inside the value of key 'long.string'");

    FileBytes array;
    append(array, static_cast<uint32_t>(GgufType::kString));
    append(array, uint64_t{2});
    append(array, std::string_view("fits"));
    append(array, length);
    expect_message(refused(small_file().set("long.array", GgufType::kArray, array).bytes()), Code::kFormat,
                   "ends inside the value of key 'long.array'");

    FileBytes bytes = small_file().bytes();
    std::memcpy(bytes.data() + 24, &length, sizeof length);  // the length of the first key's name
    expect_message(refused(bytes), Code::kFormat, "ends inside the name of key 0");
  }
}

TEST(Gguf, RefusesArraysPastTheEnd) {
  for (const GgufType type : {GgufType::kU8, GgufType::kF64, GgufType::kString}) {
    // 2^61 doubles have 2^64 bytes, which overflows to 0.
    for (const uint64_t count : {UINT64_MAX, uint64_t{1} << 61, uint64_t{10000}}) {
      FileBytes array;
      append(array, static_cast<uint32_t>(type));
      append(array, count);
      expect_message(refused(small_file().set("long.array", GgufType::kArray, array).bytes()), Code::kFormat,
                     "ends inside the value of key 'long.array'");
    }
  }
}

TEST(Gguf, RefusesUnknownValueTypes) {
  expect_message(refused(small_file().set("odd", static_cast<GgufType>(13), FileBytes(8)).bytes()),
                 Code::kFormat, "key 'odd' has the unknown value type 13");
  FileBytes array;
  append(array, 77u);
  append(array, uint64_t{1});
  expect_message(refused(small_file().set("odd", GgufType::kArray, array).bytes()), Code::kFormat,
                 "key 'odd' has the unknown value type 77");
}

TEST(Gguf, RefusesArraysOfArrays) {
  FileBytes array;
  append(array, static_cast<uint32_t>(GgufType::kArray));
  append(array, uint64_t{1});
  expect_message(refused(small_file().set("deep", GgufType::kArray, array).bytes()), Code::kUnsupported,
                 "key 'deep' is an array of arrays");
}

TEST(Gguf, RefusesATensorPastTheEnd) {
  for (const uint64_t offset : {uint64_t{64}, uint64_t{1} << 20, UINT64_MAX - 31}) {
    GgufWriter w = small_file();
    w.offsets["q8_0"] = offset;
    expect_message(refused(w.bytes()), Code::kFormat, "tensor 'q8_0' is past the end of the file");
  }
}

TEST(Gguf, RefusesAMisalignedOffset) {
  GgufWriter w = small_file();
  w.offsets["q8_0"] = 8;
  expect_message(refused(w.bytes()), Code::kFormat,
                 "tensor 'q8_0' begins at offset 8, which is not a multiple of the alignment 32");
}

TEST(Gguf, SaysWhichTensorDoesNotFollowTheOneBefore) {
  GgufWriter overlapping = small_file();
  overlapping.offsets["q8_0"] = 0;
  expect_message(
      parse(overlapping.bytes())->layout(), Code::kFormat,
      "tensor 'q8_0' begins at offset 0, but by the types and shapes before it should begin at 32");
  GgufWriter of_fewer_bits = small_file();
  of_fewer_bits.tensor("f32", {64, 4}, 8, FileBytes(4 * 68)).tensor("last", {4}, std::vector<float>(4));
  EXPECT_TRUE(parse(of_fewer_bits.bytes())->layout().ok());
  of_fewer_bits.tensors[1].type = 2;
  expect_message(
      parse(of_fewer_bits.bytes())->layout(), Code::kFormat,
      "tensor 'last' begins at offset 352, but by the types and shapes before it should begin at 224");
}

TEST(Gguf, RefusesABadAlignment) {
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 1u << 21, 0x80000000u})
    expect_message(refused(small_file().set("general.alignment", alignment).bytes()), Code::kFormat,
                   "key 'general.alignment' is " + std::to_string(alignment));
  expect_message(refused(small_file().set("general.alignment", "32").bytes()), Code::kFormat,
                 "'general.alignment'");
}

TEST(Gguf, FollowsTheAlignmentOfTheFile) {
  for (const uint32_t alignment : {8u, 64u, 4096u, 65536u}) {
    GgufWriter w = small_file();
    w.alignment = alignment;
    const FileBytes bytes = w.set("general.alignment", alignment).bytes();
    const Result<Gguf> g = parse(bytes);
    ASSERT_TRUE(g.ok()) << g.status().message();
    EXPECT_EQ(reinterpret_cast<const float*>(g->tensor("f32")->data)[7], 7.0f);
    EXPECT_EQ(g->tensor("q8_0")->data[0], std::byte{7});
  }
}

TEST(Gguf, RefusesLentMemoryThatIsNotAligned) {
  const FileBytes bytes = small_file().bytes();
  FileBytes shifted(8);
  append(shifted, bytes.data(), bytes.size());
  const Status status = Gguf::parse(MappedFile::lend(shifted.data() + 8, bytes.size()), "m.gguf").status();
  expect_message(status, Code::kInvalidArgument, "must begin at a multiple of 32 bytes");
}

TEST(Gguf, RefusesOverflowingAndEmptyDimensions) {
  const uint64_t huge = uint64_t{1} << 32;
  for (const std::vector<uint64_t>& shape : {std::vector<uint64_t>{huge, huge},
                                             {UINT64_MAX, 2},
                                             {0},
                                             {4, 0},
                                             {uint64_t{1} << 62, 1}}) {  // 2^62 floats have 2^64 bytes
    GgufWriter w = small_file();
    w.tensor("big", shape, 0, FileBytes(4));
    expect_message(refused(w.bytes()), Code::kFormat,
                   "tensor 'big' has dimensions that are zero or too large");
  }
  GgufWriter w = small_file();
  w.tensor("big", {huge, 2}, 0, FileBytes(4));
  expect_message(refused(w.bytes()), Code::kFormat, "tensor 'big' is past the end");
}

TEST(Gguf, RefusesTensorsWithoutOrWithTooManyDimensions) {
  for (const size_t dims : {0, 5}) {
    GgufWriter w = small_file();
    w.tensor("odd", std::vector<uint64_t>(dims, 1), 0, FileBytes(4));
    expect_message(refused(w.bytes()), Code::kFormat,
                   "tensor 'odd' has " + std::to_string(dims) + " dimensions");
  }
}

TEST(Gguf, RefusesRowsThatEndInsideABlock) {
  GgufWriter w = small_file();
  w.tensor("ragged", {48, 2}, 8, FileBytes(102));
  expect_message(refused(w.bytes()), Code::kFormat,
                 "tensor 'ragged' has rows of 48 elements, not a multiple of the 32 in a block of q8_0");
}

TEST(Gguf, OpensAFileWithATensorOfUnknownType) {
  for (const uint32_t type : {43u, 9999u}) {
    GgufWriter w = small_file();
    w.tensor("odd", {64}, type, FileBytes(10));
    const FileBytes bytes = w.bytes();
    const Result<Gguf> g = parse(bytes);
    ASSERT_TRUE(g.ok()) << g.status().message();
    EXPECT_EQ(g->tensor("odd")->type, type);
    EXPECT_EQ(g->tensor("odd")->bytes, 0u);
  }
}

TEST(Gguf, OpensAFileWithoutTensorsThatIsNotPadded) {
  GgufWriter w;
  w.set("k", "v");
  const FileBytes bytes = w.bytes();
  ASSERT_NE(bytes.size() % 32, 0u);
  EXPECT_TRUE(parse(bytes).ok());
}

TEST(Gguf, SurvivesEveryByteReplaced) {
  const FileBytes good = small_file().bytes();
  size_t accepted = 0;
  for (size_t at = 0; at < good.size(); ++at)
    for (const uint8_t value : {0x00, 0x01, 0x7f, 0x80, 0xff}) {
      FileBytes bytes = good;
      bytes[at] = std::byte{value};
      const Result<Gguf> g = parse(bytes);
      if (!g.ok()) {
        EXPECT_FALSE(g.status().message().empty());
        continue;
      }
      ++accepted;
      for (const GgufTensor& t : g->tensors()) {
        ASSERT_GE(t.data, bytes.data());
        ASSERT_LE(t.data + t.bytes, bytes.data() + bytes.size());
      }
      for (const auto& [key, v] : g->metadata()) ASSERT_LE(printed(v).size(), 10000u) << in_quotes(key);
    }
  EXPECT_GT(accepted, 0u);
}

}  // namespace
}  // namespace thimble
