// The shift that divides `width` + 1 keys into at most `bins` bins, a power of two.
uint bin_shift(uint width, uint bins) { return uint(max(findMSB(width) + 1 - findMSB(bins), 0)); }
