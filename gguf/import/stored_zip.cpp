#include "gguf/import/stored_zip.h"

#include <algorithm>
#include <cstdint>

#include "base/byte_reader.h"
#include "gguf/gguf.h"

namespace thimble {
namespace {

constexpr uint32_t kEndOfDirectory = 0x06054b50, kDirectoryEntry = 0x02014b50, kLocalEntry = 0x04034b50;
constexpr size_t kEndBytes = 22, kLongestComment = 0xffff;

Status damaged(const std::string& file) {
  return error(Code::kFormat, "%s is a damaged or incomplete zip archive", file.c_str());
}

struct Directory {
  uint16_t entries = 0;
  uint32_t bytes = 0, offset = 0;
};

// The end record says where the directory is. A comment of any length may follow it, so we search for it.
Result<Directory> find_directory(std::span<const std::byte> archive, const std::string& file) {
  if (archive.size() < kEndBytes) return damaged(file);
  const size_t last = archive.size() - kEndBytes;
  for (size_t at = last; last - at <= kLongestComment; --at) {
    ByteReader reader(archive.subspan(at));
    uint32_t signature = 0;
    uint16_t disk = 0, first_disk = 0, entries_here = 0;
    Directory directory;
    // Cannot fail: the loop left enough bytes for all fields.
    (void)(reader.read(signature) && reader.read(disk) && reader.read(first_disk) &&
           reader.read(entries_here) && reader.read(directory.entries) && reader.read(directory.bytes) &&
           reader.read(directory.offset));
    if (signature == kEndOfDirectory) {
      if (directory.entries == UINT16_MAX || directory.offset == UINT32_MAX)
        return error(Code::kUnsupported, "%s is a zip archive of more than 4 GiB, too large for a retainer",
                     file.c_str());
      return directory;
    }
    if (at == 0) break;
  }
  return damaged(file);
}

// A row of the directory.
struct Entry {
  uint16_t flags, method;
  uint32_t packed, bytes, offset;
  std::string_view name;
};

bool read_entry(ByteReader& reader, Entry& entry) {
  uint32_t signature, checksum;
  uint16_t name, extra, comment;
  return reader.read(signature) && signature == kDirectoryEntry && reader.skip(4) &&
         reader.read(entry.flags) && reader.read(entry.method) && reader.skip(4) && reader.read(checksum) &&
         reader.read(entry.packed) && reader.read(entry.bytes) && reader.read(name) && reader.read(extra) &&
         reader.read(comment) && reader.skip(8) && reader.read(entry.offset) &&
         reader.take(name, entry.name) && reader.skip(uint64_t{extra} + comment);
}

// Finds the contents, which follow the entry's local header.
bool find_contents(std::span<const std::byte> archive, const Entry& entry,
                   std::span<const std::byte>& contents) {
  ByteReader reader(archive);
  uint32_t signature;
  uint16_t name, extra;
  if (!reader.skip(entry.offset) || !reader.read(signature) || signature != kLocalEntry || !reader.skip(22) ||
      !reader.read(name) || !reader.read(extra) || !reader.skip(uint64_t{name} + extra) ||
      reader.left() < entry.bytes)
    return false;
  contents = {reader.at(), entry.bytes};
  return true;
}

}  // namespace

Result<ZipEntries> read_stored_zip(std::span<const std::byte> archive, const std::string& file) {
  THIMBLE_LET(directory, find_directory(archive, file));
  ByteReader reader(archive);
  if (!reader.skip(directory.offset)) return damaged(file);
  ZipEntries entries;
  for (uint32_t i = 0; i < directory.entries; ++i) {
    Entry entry;
    if (!read_entry(reader, entry)) return damaged(file);
    constexpr uint16_t kEncrypted = 1, kStored = 0;
    if (entry.method != kStored || entry.flags & kEncrypted)
      return error(Code::kUnsupported,
                   "%s: entry %s is compressed, which torch.save does not do; unpack it and zip it with -0",
                   file.c_str(), in_quotes(entry.name).c_str());
    if (entry.bytes == UINT32_MAX || entry.offset == UINT32_MAX)
      return error(Code::kUnsupported, "%s: entry %s takes more than 4 GiB, too large for a retainer",
                   file.c_str(), in_quotes(entry.name).c_str());
    std::span<const std::byte> contents;
    if (entry.packed != entry.bytes || !find_contents(archive, entry, contents)) return damaged(file);
    if (!entries.emplace(entry.name, contents).second)
      return error(Code::kFormat, "%s has the entry %s twice", file.c_str(), in_quotes(entry.name).c_str());
  }
  return entries;
}

}  // namespace thimble
