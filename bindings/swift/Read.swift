// Reads a text inside 64 MiB and streams what comes next: read MODEL.gguf TEXT.txt
import CThimble
import Foundation

struct Failure: Error, CustomStringConvertible {
  let code: thimble_status
  let description: String
}

/// A call that takes a thimble_error as its last argument; throws what that says.
func check(_ call: (UnsafeMutablePointer<thimble_error>) -> thimble_status) throws {
  var error = thimble_error()
  error.struct_size = UInt32(MemoryLayout<thimble_error>.size)
  let code = call(&error)
  if code == 0 { return }
  let message = withUnsafeBytes(of: error.message) { bytes in String(decoding: bytes.prefix { $0 != 0 }, as: UTF8.self) }
  throw Failure(code: code, description: message)
}

func read(_ path: String, _ text: String) throws {
  var options = thimble_session_options()
  thimble_session_options_init(&options, UInt32(MemoryLayout<thimble_session_options>.size))
  options.budget_bytes = 64 << 20
  options.retention = Int32(THIMBLE_RETENTION_WINDOW)
  options.pool = 1024

  var model: OpaquePointer?
  try check { thimble_model_open(path, nil, &model, $0) }
  defer { thimble_model_free(model) }
  var session: OpaquePointer?
  try check { thimble_session_create(model, &options, &session, $0) }
  defer { thimble_session_free(session) }  // runs before the one above, as it must

  // The first call asks for the count.
  let bytes = UInt64(text.utf8.count), flags = UInt32(THIMBLE_TOKENIZE_ADD_BOS)
  var count: UInt64 = 0
  _ = thimble_tokenize(model, text, bytes, flags, nil, nil, 0, &count, nil)
  var ids = [Int32](repeating: 0, count: Int(count))
  try check { thimble_tokenize(model, text, bytes, flags, &ids, nil, count, &count, $0) }

  try check { thimble_session_feed(session, ids, count, $0) }
  for _ in 0..<64 {
    var token: Int32 = 0, length: UInt64 = 0
    var piece = [CChar](repeating: 0, count: 256)
    try check { thimble_session_step(session, &token, $0) }
    if thimble_token_ends(model, token) != 0 { break }
    try check { thimble_session_text(session, token, &piece, 256, &length, $0) }
    let text = piece.prefix(Int(length)).map { UInt8(bitPattern: $0) }  // whole code points
    FileHandle.standardOutput.write(Data(text))
  }
  print()
}

guard CommandLine.arguments.count == 3 else {
  print("usage: read MODEL.gguf TEXT.txt")
  exit(2)
}
do {
  try read(CommandLine.arguments[1], String(contentsOfFile: CommandLine.arguments[2], encoding: .utf8))
} catch {
  print("read: \(error)")
  exit(1)
}
