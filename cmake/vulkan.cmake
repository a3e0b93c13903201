# THIMBLE_VULKAN: AUTO builds the Vulkan backend where Vulkan's headers and glslangValidator are found, ON insists, OFF
# leaves it out. libvulkan itself is looked for when the backend is first used.
set(THIMBLE_VULKAN OFF CACHE STRING "Build the Vulkan backend: AUTO, ON, OFF")
set_property(CACHE THIMBLE_VULKAN PROPERTY STRINGS AUTO ON OFF)

if(THIMBLE_VULKAN)
  find_path(THIMBLE_VULKAN_INCLUDE vulkan/vulkan_core.h DOC "Vulkan's headers, 1.2.162 or newer")
  find_program(THIMBLE_GLSLANG NAMES glslangValidator glslang DOC "Compiler of the shaders")
  if(THIMBLE_VULKAN STREQUAL "ON" AND NOT (THIMBLE_VULKAN_INCLUDE AND THIMBLE_GLSLANG))
    message(FATAL_ERROR "THIMBLE_VULKAN is ON; it needs Vulkan's headers (vulkan/vulkan_core.h) and glslangValidator: install "
                        "them (Debian: libvulkan-dev glslang-tools), or set THIMBLE_VULKAN_INCLUDE and THIMBLE_GLSLANG")
  endif()
endif()

# thimble_shaders(TARGET LIST): compiles every row of the list (shaders.h) from shaders/ beside it, and adds them to the target
# as shader_list.inc, which holds an array kNAMECode for each row.
function(thimble_shaders target list)
  set(folder ${CMAKE_CURRENT_SOURCE_DIR}/shaders)
  set(output ${CMAKE_CURRENT_BINARY_DIR}/shaders)
  file(MAKE_DIRECTORY ${output})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${list})
  file(STRINGS ${list} rows REGEX "^ *X\\(")
  string(REPLACE "\\;" ";" rows "${rows}") # the backslash at the end of a line would quote the separator
  set(includes)
  set(headers)
  foreach(row ${rows})
    if(NOT row MATCHES "^ *X\\(([A-Za-z0-9_]+), \"([a-z0-9_]+)\", \"([^\"]*)\"\\)")
      message(FATAL_ERROR "${list}: not X(Name, \"file\", \"DEFINES\"): ${row}")
    endif()
    set(name k${CMAKE_MATCH_1}Code)
    set(source ${folder}/${CMAKE_MATCH_2}.comp)
    set(header ${output}/${CMAKE_MATCH_1}.h)
    separate_arguments(defines UNIX_COMMAND "${CMAKE_MATCH_3}")
    list(TRANSFORM defines PREPEND -D)
    add_custom_command(
      OUTPUT ${header}
      COMMAND ${THIMBLE_GLSLANG} --quiet -V --target-env vulkan1.2 ${defines} --vn ${name} --depfile ${header}.d -o ${header} ${source}
      DEPENDS ${source}
      DEPFILE ${header}.d
      COMMENT "Compiling shader ${CMAKE_MATCH_1}"
      VERBATIM)
    list(APPEND headers ${header})
    string(APPEND includes "#include \"shaders/${CMAKE_MATCH_1}.h\"\n")
  endforeach()
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/shader_list.inc CONTENT "${includes}")
  target_sources(${target} PRIVATE ${headers})
  target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR})
  list(LENGTH rows count)
  message(STATUS "Vulkan: ${count} shader variants")
endfunction()
