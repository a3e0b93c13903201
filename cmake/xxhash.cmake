# Copies xxhash.h, which is all that is used of xxHash, into xxhash/ of the build folder. It is the same for every system, but
# beside it lie the headers of the build machine's C library.
find_path(THIMBLE_XXHASH_INCLUDE xxhash.h PATHS /usr/include DOC "Folder of xxhash.h, 0.8 or newer" REQUIRED
          NO_CMAKE_FIND_ROOT_PATH)
configure_file(${THIMBLE_XXHASH_INCLUDE}/xxhash.h ${PROJECT_BINARY_DIR}/xxhash/xxhash.h COPYONLY)
