//! Memory of a tier, and buffers that are written into it.
#![expect(unsafe_code, reason = "gives buffers their memory")]

use arrow_buffer::{ArrowNativeType, Buffer, ToByteSlice};
use arrow_schema::ArrowError;
use farheap::allocator_api2::alloc::Allocator;
use farheap::allocator_api2::vec::Vec;
use farheap::{ByteCount, Tier};
use std::panic::RefUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;

/// Arrow's recommendation, and a line of the processor's cache.
const ALIGNMENT: usize = 64;

/// A unit of memory with the alignment of a buffer.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; ALIGNMENT]);
const _: () = assert!(size_of::<Line>() == ALIGNMENT && align_of::<Line>() == ALIGNMENT);

/// A buffer that is being written in far memory, or in another tier. It is aligned to 64 bytes.
///
/// # Examples
/// ```
/// use arrow_array::Int64Array;
/// use farheap::Tier;
/// use farheap_arrow::BufferWriter;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut writer = BufferWriter::new(Tier::LOCAL); // Or `FAR`, or an added one.
/// writer.extend(&[1_i64, 2, 3])?;
/// writer.extend(&[4_i64])?;
/// let array = Int64Array::new(writer.finish().into(), None);
/// assert_eq!(array.values(), &[1, 2, 3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BufferWriter {
    /// Of which the first `len` bytes are written.
    lines: Vec<Line, Tier>,
    len: usize,
}

impl BufferWriter {
    /// Begins an empty buffer.
    #[must_use]
    pub fn new(tier: Tier) -> BufferWriter {
        BufferWriter { lines: Vec::new_in(tier), len: 0 }
    }

    /// Begins a buffer with room for this number of bytes.
    ///
    /// # Errors
    /// [`ArrowError::MemoryError`] where the tier has no memory for them.
    pub fn with_capacity(tier: Tier, capacity: ByteCount) -> Result<Self, ArrowError> {
        let mut writer = BufferWriter::new(tier);
        writer.reserve(capacity.as_usize(), true)?;
        Ok(writer)
    }

    /// Appends values.
    ///
    /// # Errors
    /// [`ArrowError::MemoryError`] where the tier has no memory for them; the buffer is as before.
    pub fn extend<T: ArrowNativeType>(&mut self, values: &[T]) -> Result<(), ArrowError> {
        let bytes = values.to_byte_slice();
        self.reserve(bytes.len(), false)?;
        // SAFETY: `reserve` made room for that many bytes behind the first `len`.
        let end = unsafe { self.lines.as_mut_ptr().cast::<u8>().add(self.len) };
        // SAFETY: as above; the vector is this writer's, so `bytes` is not a part of it.
        unsafe { end.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.len += bytes.len();
        Ok(())
    }

    /// Returns the number of bytes that are written.
    #[must_use]
    pub fn len(&self) -> ByteCount {
        ByteCount(self.len as u64)
    }

    /// True if nothing is written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Ends the buffer. Its memory is freed when its last user, a slice of an array perhaps, is dropped.
    #[must_use]
    pub fn finish(self) -> Buffer {
        buffer(self.lines, self.len)
    }

    /// Makes room for more bytes: exactly this number, or for more of them later.
    fn reserve(&mut self, more: usize, is_exact: bool) -> Result<(), ArrowError> {
        let tier = *self.lines.allocator();
        let refused = || {
            let reason = format!("no memory for {more} bytes more of a buffer in {tier:?}");
            ArrowError::MemoryError(reason)
        };
        let lines = self.len.checked_add(more).ok_or_else(refused)?.div_ceil(ALIGNMENT);
        // No line counts as written: the vector's length stays zero, and `lines` are those it has room for.
        let room = if is_exact {
            self.lines.try_reserve_exact(lines)
        } else {
            self.lines.try_reserve(lines)
        };
        room.map_err(|_| refused())
    }
}

/// Makes a buffer of a vector in far memory, or of any other allocator, without a copy.
///
/// # Examples
/// ```
/// use arrow_array::Int32Array;
/// use farheap::{Local, allocator_api2::vec::Vec};
///
/// let mut values: Vec<i32, Local> = Vec::new_in(Local); // Or `Far`, or `heap.tier()`.
/// values.extend(0..1000);
/// let array = Int32Array::new(farheap_arrow::buffer_of_vec(values).into(), None);
/// assert_eq!(array.value(999), 999);
/// ```
#[must_use]
pub fn buffer_of_vec<T, A>(values: Vec<T, A>) -> Buffer
where
    T: ArrowNativeType + RefUnwindSafe,
    A: Allocator + RefUnwindSafe + Send + Sync + 'static,
{
    let len = size_of_val(&values[..]);
    buffer(values, len)
}

/// The first `len` bytes of a vector's memory.
fn buffer<T, A>(values: Vec<T, A>, len: usize) -> Buffer
where
    T: RefUnwindSafe + Send + Sync + 'static,
    A: Allocator + RefUnwindSafe + Send + Sync + 'static,
{
    assert!(len <= values.capacity() * size_of::<T>(), "{len} bytes of {}", values.capacity());
    let start = NonNull::from(&values[..]).cast::<u8>();
    // SAFETY:
    // - `start` is valid for `len` bytes, as checked above, and stays so while the vector lives, which nobody changes.
    // - All of them are written: a `BufferWriter` counts those that are, and a vector of native types has no padding.
    unsafe { Buffer::from_custom_allocation(start, len, Arc::new(values)) }
}
