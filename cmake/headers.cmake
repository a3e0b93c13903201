# thimble_headers(NAME HEADER [REQUIRED] [WITH FOLDER...]): finds a header-only library. NAME_INCLUDE, which
# the user may set, is the folder that contains HEADER. NAME_HEADERS is the include folder to compile with,
# empty if there is none.
#
# Such headers are the same for every system, so cross compilers also use those of the build machine. But the
# same folder contains the headers of the build machine's C library. Therefore a cross compiler gets a folder
# that contains only HEADER's part, and the folders that HEADER needs.
function(thimble_headers name header)
  cmake_parse_arguments(PARSE_ARGV 2 arg REQUIRED "" WITH)
  find_path(${name}_INCLUDE ${header} PATHS /usr/include NO_CMAKE_FIND_ROOT_PATH DOC "Folder of ${header}")
  set(folder ${${name}_INCLUDE})
  if(NOT folder)
    if(arg_REQUIRED)
      message(FATAL_ERROR "${header} was not found: install it (scripts/setup names the packages), or set ${name}_INCLUDE")
    endif()
    set(folder)
  elseif(CMAKE_CROSSCOMPILING)
    set(folder ${CMAKE_BINARY_DIR}/headers/${name})
    file(MAKE_DIRECTORY ${folder})
    string(REGEX MATCH "^[^/]+" part ${header})
    foreach(entry ${part} ${arg_WITH})
      file(CREATE_LINK ${${name}_INCLUDE}/${entry} ${folder}/${entry} SYMBOLIC)
    endforeach()
  endif()
  set(${name}_HEADERS ${folder} PARENT_SCOPE)
endfunction()
