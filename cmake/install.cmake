# cmake --install: both libraries, the header, the command, the CMake package and the pkg-config file.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/thimble)
install(TARGETS thimble thimble_static EXPORT thimbleTargets)
install(FILES include/thimble/thimble.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/thimble)
if(TARGET thimble_command)
  # The command finds its library beside itself, so that a prefix can be moved.
  file(RELATIVE_PATH lib_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(thimble_command PROPERTIES INSTALL_RPATH $ORIGIN/${lib_from_bin})
  install(TARGETS thimble_command)
endif()
install(EXPORT thimbleTargets NAMESPACE thimble:: DESTINATION ${package_dir})
configure_package_config_file(cmake/thimble-config.cmake.in ${PROJECT_BINARY_DIR}/thimble-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/thimble-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/thimble-config.cmake ${PROJECT_BINARY_DIR}/thimble-config-version.cmake
        DESTINATION ${package_dir})

# Libs.private: what a static link needs besides, written as linker flags.
set(libs_private)
foreach(library ${THIMBLE_EXTERNALS})
  if(library STREQUAL "Threads::Threads")
    set(library -pthread)
  elseif(TARGET ${library})
    message(FATAL_ERROR "thimble.pc cannot name the target ${library}: teach cmake/install.cmake its linker flags")
  elseif(NOT library MATCHES "^[-/]")
    set(library -l${library})
  endif()
  list(APPEND libs_private ${library})
endforeach()
list(JOIN libs_private " " THIMBLE_LIBS_PRIVATE)
file(RELATIVE_PATH THIMBLE_PREFIX_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/thimble.pc.in ${PROJECT_BINARY_DIR}/thimble.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/thimble.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
