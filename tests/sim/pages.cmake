# Deterministic by seed; more seeds by hand: sim_pages FIRST COUNT.
if(TARGET kern_cache AND TARGET paging)
  keepd_plain_test(sim_pages SOURCES ${CMAKE_CURRENT_LIST_DIR}/sim_pages.c LIBS kern_cache paging)
  # Kept sets for tests/python/test_policy_reference.py.
  add_executable(dump_evict ${CMAKE_CURRENT_LIST_DIR}/dump_evict.c)
  target_link_libraries(dump_evict PRIVATE kern_cache paging)
endif()
