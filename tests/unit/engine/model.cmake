include(${CMAKE_SOURCE_DIR}/tests/golden/golden.cmake)
keepd_test(test_model_config SOURCES test_model_config.c LIBS engine_model)
keepd_test(test_gates SOURCES test_gates.c LIBS engine_model)
keepd_test(test_model SOURCES test_model.c ${KEEPD_REPLAY} LIBS engine_model kernels_cpu)
