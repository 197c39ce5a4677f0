/* SipHash-2-4 with 128 bits of output: the name of a conversation space. Pure. */
#ifndef KEEPD_SERVER_SIP_H
#define KEEPD_SERVER_SIP_H

#include <stddef.h>
#include <stdint.h>

void sip_hash128(const uint8_t key[16], const void *data, size_t size, uint8_t out[16]);

#endif
