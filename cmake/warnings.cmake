# thimble_target(NAME): the warnings and sanitizers that every target of the project is built with.
option(THIMBLE_PRECOMPILED_HEADERS "Parse the standard headers that most files include once for each library; not with ccache" OFF)
mark_as_advanced(THIMBLE_PRECOMPILED_HEADERS)
function(thimble_target name)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR})
  if(THIMBLE_PRECOMPILED_HEADERS AND name MATCHES "^thimble_(runtime|training|capi)$")
    target_precompile_headers(${name} PRIVATE <algorithm> <functional> <map> <memory> <string> <variant> <vector>)
  endif()
  set(warnings
      -Wall
      -Wextra
      -Wpedantic
      -Wshadow
      -Wpointer-arith
      -Wwrite-strings
      -Wformat=2
      -Wimplicit-fallthrough
      -Wundef
      -Wvla
      $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor>
      $<$<COMPILE_LANGUAGE:CXX>:-Woverloaded-virtual>
      $<$<COMPILE_LANGUAGE:CXX>:-Wextra-semi>
      # g++ 12 warns of "text" + std::string inside its own library (GCC bug 105651).
      $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
      -Wno-missing-field-initializers)
  # nvcc hands the host compiler code of its own making, which the stricter of these would complain of.
  set(cuda_warnings -Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-missing-field-initializers)
  if(THIMBLE_WERROR)
    list(APPEND warnings -Werror)
    list(APPEND cuda_warnings --Werror=all-warnings)
  endif()
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:${warnings}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings}>")
  if(THIMBLE_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
                                           # Where the sanitizers are, g++ sees paths that do not exist.
                                           $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
                                           $<$<AND:$<CXX_COMPILER_ID:GNU>,$<COMPILE_LANGUAGE:CXX>>:-Wno-mismatched-new-delete>)
    target_compile_definitions(${name} PRIVATE $<$<CXX_COMPILER_ID:Clang>:__SANITIZE_ADDRESS__>) # which g++ defines by itself
    target_link_options(${name} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()
