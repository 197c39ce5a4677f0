/* The description of the API, as served at /openapi.json: server/oai/openapi.json as it was when
 * the build was configured. */
#ifndef KEEPD_SERVER_OAI_OPENAPI_H
#define KEEPD_SERVER_OAI_OPENAPI_H

#include <stddef.h>

extern const char openapi_text[];
extern const size_t openapi_size;

#endif
