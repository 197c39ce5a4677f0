keepd_test(test_score SOURCES test_score.c LIBS kern_cache)
keepd_test(test_cache SOURCES test_cache.c LIBS kern_cache)
keepd_test(test_evict SOURCES test_evict.c LIBS kern_cache)
keepd_test(test_snapshot SOURCES test_snapshot.c LIBS kern_cache)
