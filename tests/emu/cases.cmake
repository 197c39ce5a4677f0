# The case files emu_NAME.c that both the emulator and a device run (bench/gpu), and those that the emulator alone runs.
set(device_cases attend cache evict experts model packed policy ptx ranks rows sample snapshot states)
set(emulator_cases alloc devices)
