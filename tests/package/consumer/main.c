/* The smallest program that uses Thimble: the header's version against the library's. */
#include <stdio.h>
#include <string.h>
#include <thimble/thimble.h>

int main(void) {
  char header[32];
  snprintf(header, sizeof header, "%d.%d.%d", THIMBLE_VERSION_MAJOR, THIMBLE_VERSION_MINOR,
           THIMBLE_VERSION_PATCH);
  thimble_error error = {sizeof error};
  thimble_model* model = NULL;
  if (thimble_model_open("no such file", NULL, &model, &error) != THIMBLE_IO) return 1;
  printf("%s: %s\n", thimble_build_info(), error.message);
  return strcmp(thimble_version(), header) != 0;
}
