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

# thimble_stored_shader(FILE NAME HEADER): writes a header with an array NAME of the words of a file of SPIR-V.
function(thimble_stored_shader file name header)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} bytes HEX)
  string(REGEX REPLACE "(..)(..)(..)(..)" "0x\\4\\3\\2\\1," words "${bytes}")
  file(CONFIGURE OUTPUT ${header} CONTENT "const uint32_t ${name}[] = {${words}};\n")
endfunction()

# thimble_shaders(TARGET LIST): compiles every X row of the list (shaders.h) from the target's shaders/, takes
# the XC rows from its spirv/, which scripts/update-spirv writes, and adds them to the target as
# shader_list.inc. That file has an array kNAMECode for each row.
function(thimble_shaders target list)
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/shaders)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/shaders)
  set(stored ${CMAKE_CURRENT_BINARY_DIR}/spirv)
  file(MAKE_DIRECTORY ${output})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} rows REGEX "^ *XC?\\(")
  string(REPLACE "\\;" ";" rows "${rows}") # the backslash at the end of a line would quote the separator
  set(includes)
  set(headers)
  foreach(row ${rows})
    if(NOT row MATCHES "^ *(XC?)\\(([A-Za-z0-9_]+), \"([a-z0-9_/]+)\", \"([^\"]*)\"\\)")
      message(FATAL_ERROR "${list}: not X(Name, \"file\", \"DEFINES\"): ${row}")
    endif()
    set(shader ${CMAKE_MATCH_2})
    set(name k${shader}Code)
    if(CMAKE_MATCH_1 STREQUAL XC)
      thimble_stored_shader(${CMAKE_CURRENT_SOURCE_DIR}/spirv/${shader}.spv ${name} ${stored}/${shader}.h)
      string(APPEND includes "#include \"spirv/${shader}.h\"\n")
      list(APPEND headers ${stored}/${shader}.h)
      continue()
    endif()
    string(APPEND includes "#include \"shaders/${shader}.h\"\n")
    set(source ${folder}/${CMAKE_MATCH_3}.comp)
    set(header ${output}/${shader}.h)
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
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/shader_list.inc CONTENT "${includes}")
  target_sources(${target} PRIVATE ${headers})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  list(LENGTH headers count)
  message(STATUS "With Vulkan, ${count} shader variants")
endfunction()
