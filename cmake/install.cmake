# cmake --install installs both libraries, the header, the command, the CMake package and the pkg-config file.
# cpack makes Debian packages of the same files, one for each component.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/thimble)
install(TARGETS thimble EXPORT thimbleTargets
        RUNTIME COMPONENT library
        LIBRARY COMPONENT library NAMELINK_COMPONENT dev
        ARCHIVE COMPONENT dev)
install(TARGETS thimble_static EXPORT thimbleTargets ARCHIVE COMPONENT dev)
install(FILES include/thimble/thimble.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/thimble COMPONENT dev)
if(TARGET thimble_command)
  # The command finds its library relative to its own path, so that a prefix can be moved.
  file(RELATIVE_PATH lib_from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(thimble_command PROPERTIES INSTALL_RPATH $ORIGIN/${lib_from_bin})
  install(TARGETS thimble_command RUNTIME COMPONENT command)
endif()
install(EXPORT thimbleTargets NAMESPACE thimble:: DESTINATION ${package_dir} COMPONENT dev)
configure_package_config_file(cmake/thimble-config.cmake.in ${PROJECT_BINARY_DIR}/thimble-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/thimble-config-version.cmake COMPATIBILITY SameMajorVersion)
install(FILES ${PROJECT_BINARY_DIR}/thimble-config.cmake ${PROJECT_BINARY_DIR}/thimble-config-version.cmake
        DESTINATION ${package_dir} COMPONENT dev)

# Libs.private: the linker flags that a static link needs in addition.
set(libs_private)
foreach(library ${THIMBLE_EXTERNALS})
  if(library STREQUAL "Threads::Threads")
    set(library -pthread)
  elseif(TARGET ${library})
    message(FATAL_ERROR "thimble.pc cannot name the target ${library}; add its linker flags to cmake/install.cmake")
  elseif(NOT library MATCHES "^[-/]")
    set(library -l${library})
  endif()
  list(APPEND libs_private ${library})
endforeach()
list(JOIN libs_private " " THIMBLE_LIBS_PRIVATE)
file(RELATIVE_PATH THIMBLE_PREFIX_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
configure_file(cmake/thimble.pc.in ${PROJECT_BINARY_DIR}/thimble.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/thimble.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT dev)

set(library_package libthimble${PROJECT_VERSION_MAJOR})
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${library_package} RENAME copyright COMPONENT library)
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGE_CONTACT "The Thimble authors")
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${CMAKE_LIBRARY_OUTPUT_DIRECTORY})
set(CPACK_DEBIAN_ENABLE_COMPONENT_DEPENDS OFF)
set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME ${library_package})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "${PROJECT_DESCRIPTION}: the library")
set(CPACK_DEBIAN_DEV_PACKAGE_NAME libthimble-dev)
set(CPACK_DEBIAN_DEV_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEV_PACKAGE_DEPENDS "${library_package} (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_DEV_DESCRIPTION "${PROJECT_DESCRIPTION}: header, static library, CMake and pkg-config files")
set(CPACK_DEBIAN_COMMAND_PACKAGE_NAME thimble)
set(CPACK_DEBIAN_COMMAND_PACKAGE_SECTION utils)
set(CPACK_DEBIAN_COMMAND_PACKAGE_DEPENDS "${library_package} (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_COMMAND_DESCRIPTION "${PROJECT_DESCRIPTION}: the command")
include(CPack)
