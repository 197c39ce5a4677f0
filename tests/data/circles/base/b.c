/* tools/check_circles must refuse the circle of these five files. */
void b_call(void);
void c_call(void);

void b_call(void) {
    c_call();
}
