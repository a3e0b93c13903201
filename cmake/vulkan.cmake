# THIMBLE_VULKAN: AUTO builds the Vulkan backend if Vulkan's headers and glslangValidator are found, ON
# requires them, OFF leaves it out. libvulkan itself is loaded when the backend is first used.
set(THIMBLE_VULKAN AUTO CACHE STRING "Build the Vulkan backend: AUTO, ON, OFF")
set_property(CACHE THIMBLE_VULKAN PROPERTY STRINGS AUTO ON OFF)

if(THIMBLE_VULKAN)
  thimble_headers(THIMBLE_VULKAN vulkan/vulkan_core.h WITH vk_video) # 1.2.162 or newer
  find_program(THIMBLE_GLSLANG NAMES glslangValidator glslang DOC "Compiler of the shaders")
  if(THIMBLE_VULKAN_HEADERS AND THIMBLE_GLSLANG)
    set(THIMBLE_HAS_VULKAN TRUE)
  elseif(THIMBLE_VULKAN STREQUAL "ON")
    message(FATAL_ERROR "THIMBLE_VULKAN is ON; it needs Vulkan's headers (vulkan/vulkan_core.h) and glslangValidator: install "
                        "them (Debian: libvulkan-dev glslang-tools), or set THIMBLE_VULKAN_INCLUDE and THIMBLE_GLSLANG")
  else()
    message(STATUS "Without Vulkan: its headers or glslangValidator were not found")
  endif()
else()
  message(STATUS "Without Vulkan: THIMBLE_VULKAN is OFF")
endif()

# Whether the compiler supports cooperative matrices: glslang 14 does, Debian 12's does not.
function(thimble_check_cooperative_matrix result)
  if(NOT THIMBLE_GLSLANG STREQUAL "${THIMBLE_GLSLANG_CHECKED}")
    set(source ${CMAKE_BINARY_DIR}/CMakeFiles/cooperative_matrix.comp)
    file(WRITE ${source} "#version 450
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
void main() { coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a = coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA>(0.0hf); }
")
    execute_process(COMMAND ${THIMBLE_GLSLANG} --quiet -V --target-env vulkan1.2 -o ${source}.spv ${source}
                    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      set(known OFF)
    else()
      set(known ON)
    endif()
    set(THIMBLE_COOPERATIVE_MATRIX ${known} CACHE INTERNAL "THIMBLE_GLSLANG knows GL_KHR_cooperative_matrix")
    set(THIMBLE_GLSLANG_CHECKED ${THIMBLE_GLSLANG} CACHE INTERNAL "The compiler that was asked")
  endif()
  set(${result} ${THIMBLE_COOPERATIVE_MATRIX} PARENT_SCOPE)
endfunction()

# thimble_shaders(TARGET LIST): compiles every row of the list (shaders.h) from the target's shaders/, and
# adds them to the target as shader_list.inc. That file has an array kNAMECode for each row, which is empty if
# the compiler cannot compile the row.
function(thimble_shaders target list)
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/shaders)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/shaders)
  file(MAKE_DIRECTORY ${output})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  thimble_check_cooperative_matrix(cooperative)
  file(STRINGS ${list} rows REGEX "^ *XC?\\(")
  string(REPLACE "\\;" ";" rows "${rows}") # the backslash at the end of a line would quote the separator
  set(includes)
  set(headers)
  foreach(row ${rows})
    if(NOT row MATCHES "^ *(XC?)\\(([A-Za-z0-9_]+), \"([a-z0-9_/]+)\", \"([^\"]*)\"\\)")
      message(FATAL_ERROR "${list}: not X(Name, \"file\", \"DEFINES\"): ${row}")
    endif()
    set(name k${CMAKE_MATCH_2}Code)
    if(CMAKE_MATCH_1 STREQUAL XC AND NOT cooperative)
      string(APPEND includes "constexpr std::span<const uint32_t> ${name};\n")
      continue()
    endif()
    set(source ${folder}/${CMAKE_MATCH_3}.comp)
    set(header ${output}/${CMAKE_MATCH_2}.h)
    set(shader ${CMAKE_MATCH_2})
    separate_arguments(defines UNIX_COMMAND "${CMAKE_MATCH_4}")
    if(THIMBLE_TESTS)
      list(APPEND defines THIMBLE_TEST_FORMATS)
    endif()
    list(TRANSFORM defines PREPEND -D)
    add_custom_command(
      OUTPUT ${header}
      COMMAND ${THIMBLE_GLSLANG} --quiet -V --target-env vulkan1.2 ${defines} --vn ${name} --depfile ${header}.d -o ${header} ${source}
      DEPENDS ${source}
      DEPFILE ${header}.d
      COMMENT "Compiling shader ${shader}"
      VERBATIM)
    list(APPEND headers ${header})
    string(APPEND includes "#include \"shaders/${shader}.h\"\n")
  endforeach()
  if(cooperative)
    string(APPEND includes "constexpr bool kCooperativeShaders = true;\n")
  else()
    string(APPEND includes "constexpr bool kCooperativeShaders = false;\n")
  endif()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/shader_list.inc CONTENT "${includes}")
  target_sources(${target} PRIVATE ${headers})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  list(LENGTH headers count)
  if(cooperative)
    message(STATUS "With Vulkan, ${count} shader variants")
  else()
    message(STATUS "With Vulkan, ${count} shader variants, without cooperative matrices, which need glslang 14")
  endif()
endfunction()
