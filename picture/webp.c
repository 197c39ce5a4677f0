/* WebP by libwebp: still pictures, lossy and lossless. */
#include <webp/decode.h>

#include "picture/codec.h"

int webp_decode(const uint8_t *data, size_t size, struct picture_rgb *out, struct fault *fault) {
    WebPBitstreamFeatures features;
    if (WebPGetFeatures(data, size, &features) != VP8_STATUS_OK)
        return fault_set(fault, ERR_MALFORMED, NULL, "the WebP file is damaged");
    if (features.has_animation)
        return fault_set(fault, ERR_UNSUPPORTED, NULL, "animated WebP files are not read");
    int rc = picture_check_size((uint64_t)features.width, (uint64_t)features.height, fault);
    if (rc) return rc;
    out->width = features.width;
    out->height = features.height;
    rc = picture_open_pixels(out, 4, fault);
    if (rc) return rc;
    const size_t row = (size_t)out->width * 4;
    if (!WebPDecodeRGBAInto(data, size, out->pixels, row * (size_t)out->height, (int)row))
        return fault_set(fault, ERR_MALFORMED, NULL, "the WebP file is damaged");
    picture_lay_on_white(out);
    return 0;
}
