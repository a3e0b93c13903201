// The shift that divides `width` + 1 keys into so many bins, a power of two, or fewer.
uint bin_shift(uint width, uint bins) { return uint(max(findMSB(width) + 1 - findMSB(bins), 0)); }
