keepd_test(test_sample SOURCES test_sample.c LIBS kernels_cpu base)
