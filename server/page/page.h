/* The page at /, on which people chat and see what the cache keeps: server/page/page.html as it was
 * when the build was configured. It is a client of the public API and loads nothing else. */
#ifndef KEEPD_SERVER_PAGE_H
#define KEEPD_SERVER_PAGE_H

#include <stddef.h>

extern const char page_text[];
extern const size_t page_size;

#define PAGE_POLICY_BYTES 512

/* Writes the page's Content-Security-Policy: only its own style and script, named by their SHA-256,
 * and requests to its own server. Any thread. */
void page_policy(char out[PAGE_POLICY_BYTES]);

#endif
