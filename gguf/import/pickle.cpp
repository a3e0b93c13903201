#include "gguf/import/pickle.h"

#include <algorithm>
#include <cinttypes>
#include <unordered_map>

#include "gguf/gguf.h"

namespace thimble {
namespace {

using Kind = PickledValue::Kind;

// Limits the memory that a pickle can take, because no instruction creates more than one value. Published
// files have a few thousand instructions.
constexpr uint32_t kMostInstructions = 1 << 20;
constexpr size_t kMostDimensions = 8;
constexpr uint8_t kProtocol = 2;

constexpr StorageType kStorages[] = {
    {"FloatStorage", "float32", 4, DType::kF32},      {"HalfStorage", "float16", 2, DType::kF16},
    {"BFloat16Storage", "bfloat16", 2, DType::kBF16}, {"DoubleStorage", "float64", 8, std::nullopt},
    {"LongStorage", "int64", 8, std::nullopt},        {"IntStorage", "int32", 4, std::nullopt},
    {"ShortStorage", "int16", 2, std::nullopt},       {"CharStorage", "int8", 1, std::nullopt},
    {"ByteStorage", "uint8", 1, std::nullopt},        {"BoolStorage", "bool", 1, std::nullopt},
};

// What a call of a known name evaluates to.
enum class Call {
  kNever,      // cannot be called; the name itself is the value
  kDict,       // an empty dict
  kTensor,     // torch._utils._rebuild_tensor_v2
  kParameter,  // its first argument
  kOpaque
};
struct Known {
  const char *module, *name;
  Call call;
};
// Some checkpoints contain training history as numpy arrays next to the tensors.
constexpr Known kKnown[] = {
    {"collections", "OrderedDict", Call::kDict},
    {"torch._utils", "_rebuild_tensor_v2", Call::kTensor},
    {"torch._utils", "_rebuild_parameter", Call::kParameter},
    {"torch", "Size", Call::kParameter},
    {"torch", "float32", Call::kNever},
    {"torch", "float16", Call::kNever},
    {"torch", "bfloat16", Call::kNever},
    {"torch", "float64", Call::kNever},
    {"numpy.core.multiarray", "_reconstruct", Call::kOpaque},
    {"numpy._core.multiarray", "_reconstruct", Call::kOpaque},
    {"numpy", "ndarray", Call::kNever},
    {"numpy", "dtype", Call::kOpaque},
    {"_codecs", "encode", Call::kOpaque},  // protocol 2 writes bytes this way
};
constexpr size_t kKnownCount = std::size(kKnown);  // numbers from here on are storages

// The instructions of protocol 2, with the names that Python's pickletools uses.
enum Instruction : uint8_t {
  kProto = 0x80,
  kStop = '.',
  kMark = '(',
  kNone = 'N',
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kLong1 = 0x8a,
  kBinFloat = 'G',
  kBinUnicode = 'X',
  kEmptyTuple = ')',
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kTuple = 't',
  kEmptyList = ']',
  kAppend = 'a',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItem = 's',
  kSetItems = 'u',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kBinGet = 'h',
  kLongBinGet = 'j',
  kGlobal = 'c',
  kReduce = 'R',
  kBuild = 'b',
  kBinPersId = 'Q',
};

class Machine {
 public:
  Machine(ByteReader& reader, const std::string& file) : reader_(reader), file_(file) {}

  Result<Pickle> run() {
    uint8_t proto = 0, protocol = 0;
    if (!reader_.read(proto) || !reader_.read(protocol)) return damaged();
    if (proto != kProto || protocol != kProtocol)
      return error(Code::kUnsupported,
                   "%s: its pickle is not of protocol 2, which torch.save writes; save it with torch.save",
                   file_.c_str());
    for (uint32_t i = 0; i < kMostInstructions; ++i) {
      uint8_t instruction;
      if (!reader_.read(instruction)) return damaged();
      if (instruction == kStop) {
        if (stack_.size() != 1 || !marks_.empty()) return damaged();
        pickle_.root = stack_[0];
        return std::move(pickle_);
      }
      THIMBLE_TRY(step(instruction));
    }
    return error(Code::kUnsupported,
                 "%s: its pickle has more than %u instructions, which no checkpoint needs", file_.c_str(),
                 kMostInstructions);
  }

 private:
  Status damaged() const {
    return error(Code::kFormat, "%s is damaged or incomplete: its pickle is cut off or invalid",
                 file_.c_str());
  }

  Status step(uint8_t instruction) {
    switch (instruction) {
      case kMark:
        marks_.push_back(stack_.size());
        return {};
      case kNone:
        return push({});
      case kNewTrue:
      case kNewFalse:
        return push({.kind = Kind::kBool, .number = instruction == kNewTrue});
      case kBinInt:
        return push_int<int32_t>();
      case kBinInt1:
        return push_int<uint8_t>();
      case kBinInt2:
        return push_int<uint16_t>();
      case kLong1:
        return push_long();
      case kBinFloat:
        return reader_.skip(sizeof(double)) ? push({.kind = Kind::kOpaque}) : damaged();
      case kBinUnicode:
        return push_text();
      case kEmptyTuple:
        return push({.kind = Kind::kTuple});
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push_tuple(instruction - kTuple1 + 1u);
      case kTuple: {
        THIMBLE_LET(count, since_mark());
        return push_tuple(count);
      }
      case kEmptyList:
        return push({.kind = Kind::kList});
      case kAppend:
        return extend(Kind::kList, 1);
      case kAppends: {
        THIMBLE_LET(count, since_mark());
        return extend(Kind::kList, count);
      }
      case kEmptyDict:
        return push({.kind = Kind::kDict});
      case kSetItem:
        return extend(Kind::kDict, 2);
      case kSetItems: {
        THIMBLE_LET(count, since_mark());
        return count % 2 == 0 ? extend(Kind::kDict, count) : damaged();
      }
      case kBinPut:
        return put<uint8_t>();
      case kLongBinPut:
        return put<uint32_t>();
      case kBinGet:
        return get<uint8_t>();
      case kLongBinGet:
        return get<uint32_t>();
      case kGlobal:
        return push_global();
      case kReduce:
        return reduce();
      case kBuild:
        return build();
      case kBinPersId:
        return push_storage();
    }
    return error(Code::kUnsupported,
                 "%s: its pickle has the instruction 0x%02x, which torch.save does not write for tensors",
                 file_.c_str(), instruction);
  }

  // ---- the stack; values below the last mark cannot be accessed ----

  size_t reachable() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  Status push(PickledValue value) {
    pickle_.values.push_back(std::move(value));
    stack_.push_back(static_cast<uint32_t>(pickle_.values.size() - 1));
    return {};
  }

  // Removes the last mark and returns the number of values above it.
  Result<size_t> since_mark() {
    if (marks_.empty()) return damaged();
    const size_t count = reachable();
    marks_.pop_back();
    return count;
  }

  std::vector<uint32_t> pop(size_t count) {
    const std::vector<uint32_t> top(stack_.end() - static_cast<ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return top;
  }

  PickledValue& value(uint32_t index) { return pickle_.values[index]; }

  // ---- values ----

  template <typename T>
  Status push_int() {
    T number;
    if (!reader_.read(number)) return damaged();
    return push({.kind = Kind::kInt, .number = number});
  }

  // Reads a two's complement number that is preceded by its size in bytes.
  Status push_long() {
    uint8_t size;
    if (!reader_.read(size) || size > sizeof(uint64_t)) return damaged();
    uint64_t number = 0;
    uint8_t byte = 0;
    for (uint32_t i = 0; i < size; ++i) {
      if (!reader_.read(byte)) return damaged();
      number |= uint64_t{byte} << (8 * i);
    }
    for (uint32_t i = size; byte & 0x80 && i < sizeof number; ++i) number |= uint64_t{0xff} << (8 * i);
    return push({.kind = Kind::kInt, .number = static_cast<int64_t>(number)});
  }

  Status push_text() {
    uint32_t size;
    std::string_view text;
    if (!reader_.read(size) || !reader_.take(size, text)) return damaged();
    return push({.kind = Kind::kText, .text = text});
  }

  Status push_tuple(size_t count) {
    if (count > reachable()) return damaged();
    return push({.kind = Kind::kTuple, .items = pop(count)});
  }

  // Adds the top `count` values to the list or dict below them.
  Status extend(Kind kind, size_t count) {
    if (count >= reachable()) return damaged();
    const std::vector<uint32_t> items = pop(count);
    PickledValue& to = value(stack_.back());
    if (to.kind != kind) return damaged();
    to.items.insert(to.items.end(), items.begin(), items.end());
    return {};
  }

  template <typename T>
  Status put() {
    T index;
    if (!reader_.read(index) || reachable() == 0) return damaged();
    memo_[index] = stack_.back();
    return {};
  }

  template <typename T>
  Status get() {
    T index;
    if (!reader_.read(index)) return damaged();
    const auto found = memo_.find(index);
    if (found == memo_.end()) return damaged();
    stack_.push_back(found->second);
    return {};
  }

  // ---- names and calls ----

  bool take_line(std::string_view& line) {
    const auto* from = reinterpret_cast<const char*>(reader_.at());
    const auto end = std::string_view(from, reader_.left()).find('\n');
    return end != std::string_view::npos && reader_.take(end, line) && reader_.skip(1);
  }

  Status push_global() {
    std::string_view module, name;
    if (!take_line(module) || !take_line(name)) return damaged();
    const auto known = std::find_if(std::begin(kKnown), std::end(kKnown),
                                    [&](const Known& k) { return module == k.module && name == k.name; });
    size_t index = static_cast<size_t>(known - kKnown);
    if (known == std::end(kKnown)) {
      const auto storage = std::find_if(std::begin(kStorages), std::end(kStorages),
                                        [&](const StorageType& s) { return name == s.python; });
      if (module != "torch" || storage == std::end(kStorages))
        return error(
            Code::kUnsupported,
            "%s calls %s, which loading tensors does not need; it was not run, and the file is refused",
            file_.c_str(), in_quotes(std::string(module) + "." + std::string(name)).c_str());
      index += static_cast<size_t>(storage - kStorages);
    }
    return push({.kind = Kind::kGlobal, .number = static_cast<int64_t>(index)});
  }

  Status reduce() {
    if (reachable() < 2) return damaged();
    const std::vector<uint32_t> top = pop(2);
    const PickledValue &callee = value(top[0]), &arguments = value(top[1]);
    if (callee.kind != Kind::kGlobal || arguments.kind != Kind::kTuple) return damaged();
    const size_t index = static_cast<size_t>(callee.number);
    switch (index < kKnownCount ? kKnown[index].call : Call::kNever) {
      case Call::kDict:
        return arguments.items.empty() ? push({.kind = Kind::kDict}) : damaged();
      case Call::kTensor:
        return push_tensor(arguments.items);
      case Call::kParameter:
        if (arguments.items.empty()) return damaged();
        stack_.push_back(arguments.items[0]);
        return {};
      case Call::kOpaque:
        return push({.kind = Kind::kOpaque});
      case Call::kNever:
        return damaged();
    }
    return damaged();
  }

  // Sets the attributes of an object. Only an OrderedDict has any: its `_metadata`, which says nothing about
  // tensors.
  Status build() {
    if (reachable() < 2) return damaged();
    pop(1);
    const Kind kind = value(stack_.back()).kind;
    return kind == Kind::kDict || kind == Kind::kOpaque ? Status() : damaged();
  }

  // A storage is the tuple ('storage', type, key, device, elements). Older files may append a sixth item, a
  // view of another storage.
  Status push_storage() {
    if (reachable() < 1) return damaged();
    const PickledValue& id = value(pop(1)[0]);
    if (id.kind != Kind::kTuple || id.items.size() < 5 || id.items.size() > 6) return damaged();
    const auto part = [&](size_t i) -> const PickledValue& { return value(id.items[i]); };
    const PickledValue &what = part(0), &type = part(1), &key = part(2), &elements = part(4);
    if (what.kind != Kind::kText || what.text != "storage" || type.kind != Kind::kGlobal ||
        type.number < static_cast<int64_t>(kKnownCount) || key.kind != Kind::kText ||
        elements.kind != Kind::kInt || elements.number < 0)
      return damaged();
    if (id.items.size() == 6 && part(5).kind != Kind::kNone)
      return error(
          Code::kUnsupported,
          "%s holds a view of a part of a storage, as old versions of torch wrote; save it again with "
          "a newer one",
          file_.c_str());
    pickle_.storages.push_back({key.text, &kStorages[static_cast<size_t>(type.number) - kKnownCount],
                                static_cast<uint64_t>(elements.number)});
    return push({.kind = Kind::kStorage, .number = static_cast<int64_t>(pickle_.storages.size() - 1)});
  }

  // Reads the numbers of a shape.
  bool read_extents(const PickledValue& tuple, std::vector<uint64_t>& extents) {
    if (tuple.kind != Kind::kTuple || tuple.items.size() > kMostDimensions) return false;
    for (const uint32_t item : tuple.items) {
      const PickledValue& extent = value(item);
      if (extent.kind != Kind::kInt || extent.number < 0) return false;
      extents.push_back(static_cast<uint64_t>(extent.number));
    }
    return true;
  }

  // Arguments of _rebuild_tensor_v2: storage, offset, shape, strides, and items that only gradients need.
  Status push_tensor(const std::vector<uint32_t>& arguments) {
    if (arguments.size() < 4) return damaged();
    const PickledValue &storage = value(arguments[0]), &offset = value(arguments[1]);
    std::vector<uint64_t> shape, strides;
    if (storage.kind != Kind::kStorage || offset.kind != Kind::kInt || offset.number < 0 ||
        !read_extents(value(arguments[2]), shape) || !read_extents(value(arguments[3]), strides) ||
        strides.size() != shape.size())
      return damaged();
    const PickledStorage& elements_in = pickle_.storages[static_cast<size_t>(storage.number)];
    const std::optional<uint64_t> elements = elements_of(shape);
    const auto first = static_cast<uint64_t>(offset.number);
    if (!elements || first > elements_in.elements || *elements > elements_in.elements - first)
      return damaged();
    uint64_t stride = 1;  // the stride of rows without gaps
    for (size_t d = shape.size(); d-- > 0;) {
      if (shape[d] > 1 && strides[d] != stride)
        return error(Code::kUnsupported,
                     "%s holds a tensor whose rows do not follow each other; save it as contiguous()",
                     file_.c_str());
      stride *= std::max<uint64_t>(shape[d], 1);
    }
    pickle_.tensors.push_back({static_cast<uint32_t>(storage.number), first, *elements, std::move(shape)});
    return push({.kind = Kind::kTensor, .number = static_cast<int64_t>(pickle_.tensors.size() - 1)});
  }

  ByteReader& reader_;
  const std::string& file_;
  Pickle pickle_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;  // stack heights at the marks
  std::unordered_map<uint32_t, uint32_t> memo_;
};

}  // namespace

Result<Pickle> read_pickle(ByteReader& reader, const std::string& file) {
  return Machine(reader, file).run();
}

}  // namespace thimble
