# thimble_target(NAME): sets the warnings and sanitizers with which every target of the project is built.
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
      # g++ 12 warns about "text" + std::string inside its own library (GCC bug 105651).
      $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
      -Wno-missing-field-initializers)
  # nvcc passes generated code to the host compiler, which would fail the stricter of these warnings.
  set(cuda_warnings -Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-missing-field-initializers)
  if(THIMBLE_WERROR)
    list(APPEND warnings -Werror)
    list(APPEND cuda_warnings --Werror=all-warnings)
  endif()
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:C,CXX>:${warnings}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings}>")
  if(THIMBLE_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
                                           # With the sanitizers, g++ warns about paths that do not exist.
                                           $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>
                                           $<$<AND:$<CXX_COMPILER_ID:GNU>,$<COMPILE_LANGUAGE:CXX>>:-Wno-mismatched-new-delete>)
    # g++ defines this macro itself.
    target_compile_definitions(${name} PRIVATE $<$<CXX_COMPILER_ID:Clang>:__SANITIZE_ADDRESS__>)
    target_link_options(${name} PUBLIC -fsanitize=address,undefined)
  endif()
endfunction()
