/* The smallest program: reads a text inside 64 MiB and streams what comes next.
 * minimal MODEL.gguf "Once upon a time" */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "thimble/thimble.h"

int main(int argc, char** argv) {
  thimble_error error = {sizeof error, 0, 0, ""};
  thimble_model* model = NULL;
  thimble_session* session = NULL;
  thimble_session_options options;
  int32_t* ids = NULL;
  int32_t token;
  uint64_t count = 0;
  int result = 1;
  if (argc != 3) {
    fprintf(stderr, "usage: minimal MODEL.gguf TEXT\n");
    return 2;
  }

  thimble_session_options_init(&options, sizeof options);
  options.budget_bytes = 64 << 20;
  options.retention = THIMBLE_RETENTION_WINDOW;
  options.pool = 1024;
  if (thimble_model_open(argv[1], NULL, &model, &error) != THIMBLE_OK ||
      thimble_session_create(model, &options, &session, &error) != THIMBLE_OK) {
    goto end;
  }

  /* The first call asks for the count. */
  thimble_tokenize(model, argv[2], strlen(argv[2]), THIMBLE_TOKENIZE_ADD_BOS, NULL, NULL, 0, &count, NULL);
  ids = malloc(count * sizeof *ids + 1);
  if (!ids || thimble_tokenize(model, argv[2], strlen(argv[2]), THIMBLE_TOKENIZE_ADD_BOS, ids, NULL, count,
                               &count, &error) != THIMBLE_OK) {
    goto end;
  }

  if (thimble_session_feed(session, ids, count, &error) != THIMBLE_OK) goto end;
  for (int n = 0; n < 64; ++n) {
    char text[256];
    uint64_t length;
    if (thimble_session_step(session, &token, &error) != THIMBLE_OK) goto end;
    if (thimble_token_ends(model, token)) break;
    if (thimble_session_text(session, token, text, sizeof text, &length, &error) != THIMBLE_OK) goto end;
    fwrite(text, 1, length, stdout);
    fflush(stdout);
  }
  printf("\n");
  result = 0;

end:
  if (result) fprintf(stderr, "minimal: %s\n", error.message);
  free(ids);
  thimble_session_free(session);
  thimble_model_free(model);
  return result;
}
