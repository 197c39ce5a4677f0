/* The policies' names for texts that list them all (help, manual page). paging/policy.c has the
 * rows; tests/unit/paging/test_policy.c compares the two. */
#ifndef KEEPD_PAGING_NAMES_H
#define KEEPD_PAGING_NAMES_H

#define POLICY_NAMES                                                                               \
    "full, streaming, trimkv, global, gkv, rkv, snapkv, pyramidkv, adakv, morphkv, cake, h2o, "    \
    "kvcompress, d2o, ems, tova, expected_attention, keydiff, knorm, lagkv"

#endif
