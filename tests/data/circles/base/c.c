/* tools/check_circles must refuse the circle of these five files. */
void c_call(void);
void d_call(void);

void c_call(void) {
    d_call();
}
