//! Memory that is there from the start: a page that is touched for the first time when many requests are in flight is
//! memory that nobody has made room for.

/// A vector with room for `capacity` items that has its memory.
pub(crate) fn reserved<T: Clone>(capacity: usize, any: T) -> Vec<T> {
    let mut all = vec![any; capacity];
    all.clear();
    all
}

/// Zeros that have their memory.
pub(crate) fn zeroed(len: usize) -> Box<[u8]> {
    let mut bytes: Box<[u8]> = vec![0; len].into();
    touch(&mut bytes);
    bytes
}

/// Writes to each page of bytes, and leaves them what they are.
pub(crate) fn touch(bytes: &mut [u8]) {
    const PAGE_MIN: usize = 4096;
    for page in bytes.chunks_mut(PAGE_MIN) {
        // Unknown to the compiler, which would leave out a write of what is there.
        page[0] = std::hint::black_box(page[0]);
    }
}
