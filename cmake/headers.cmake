# thimble_headers(NAME HEADER [REQUIRED] [WITH FOLDER...]): finds a library that is headers alone. NAME_INCLUDE, which may be given,
# is the folder that has HEADER; NAME_HEADERS is what to compile with, empty where there is none.
#
# Such headers are the same for every system, so cross compilers take the build machine's, too. But beside them lie those of its
# C library; hence a folder that shows HEADER's part of it alone, and the folders that it needs besides.
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
