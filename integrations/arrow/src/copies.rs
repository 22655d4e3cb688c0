//! Copies of arrays in another placement.
#![expect(unsafe_code, reason = "builds arrays of copied parts without validating them again")]

use crate::BufferWriter;
use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, NullBuffer};
use arrow_data::{ArrayData, ArrayDataBuilder, BufferSpec, layout};
use arrow_schema::{ArrowError, DataType};
use farheap::{ByteCount, Tier};
use std::collections::HashMap;
use std::ops::Range;

/// Copies a buffer to far memory, or to another placement. The copy is aligned to 64 bytes.
///
/// # Errors
/// [`ArrowError::MemoryError`] where the placement has no memory for it.
pub fn copy_buffer(buffer: &Buffer, to: Tier) -> Result<Buffer, ArrowError> {
    let mut writer = BufferWriter::with_capacity(to, ByteCount(buffer.len() as u64))?;
    writer.extend(buffer.as_slice())?;
    Ok(writer.finish())
}

/// Copies an array to far memory, or to another placement: of a slice only what it shows, where the layout permits.
///
/// # Errors
/// [`ArrowError::MemoryError`] where the placement has no memory for it.
pub fn copy_array(array: &dyn Array, to: Tier) -> Result<ArrayRef, ArrowError> {
    Ok(make_array(Copier::new(to).array(&array.to_data())?))
}

/// Copies record batches to far memory, or to another placement, as [`copy_array`] copies their columns. Buffers that they
/// share, such as the values of a dictionary, are copied once.
///
/// # Errors
/// [`ArrowError::MemoryError`] where the placement has no memory for all of them; there are no copies then.
///
/// # Examples
/// ```
/// use arrow_array::{Int32Array, RecordBatch, StringArray};
/// use farheap::Tier;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let batch = RecordBatch::try_from_iter([
///     ("number", Arc::new(Int32Array::from(vec![1, 2, 3])) as _),
///     ("name", Arc::new(StringArray::from(vec!["one", "two", "three"])) as _),
/// ])?;
/// let copies = farheap_arrow::copy_batches(&[batch.clone()], Tier::LOCAL)?; // Or `FAR`, or an added one.
/// assert_eq!(copies, [batch]);
/// # Ok(())
/// # }
/// ```
pub fn copy_batches(batches: &[RecordBatch], to: Tier) -> Result<Vec<RecordBatch>, ArrowError> {
    let mut copier = Copier::new(to);
    let mut copy = |batch: &RecordBatch| {
        let columns = batch.columns().iter();
        let columns: Result<_, ArrowError> =
            columns.map(|column| Ok(make_array(copier.array(&column.to_data())?))).collect();
        let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
        RecordBatch::try_new_with_options(batch.schema(), columns?, &options)
    };
    batches.iter().map(&mut copy).collect()
}

/// Copies arrays, and what they share once. It keeps the originals of that, so that no other is at their address.
struct Copier {
    to: Tier,
    /// Original and copy of a buffer, by its address and length.
    buffers: HashMap<(usize, usize), (Buffer, Buffer)>,
    /// Original and copy of a dictionary's values, by the address of their first buffer and their number.
    values: HashMap<(usize, usize), (ArrayData, ArrayData)>,
}

impl Copier {
    fn new(to: Tier) -> Copier {
        Copier { to, buffers: HashMap::new(), values: HashMap::new() }
    }

    fn array(&mut self, from: &ArrayData) -> Result<ArrayData, ArrowError> {
        let mut offset = 0;
        let (buffers, children) = match from.data_type() {
            DataType::Utf8 | DataType::Binary => self.variable::<i32>(from)?,
            DataType::LargeUtf8 | DataType::LargeBinary => self.variable::<i64>(from)?,
            DataType::List(_) | DataType::Map(..) => self.list::<i32>(from)?,
            DataType::LargeList(_) => self.list::<i64>(from)?,
            DataType::Boolean => {
                offset = from.offset() % 8;
                let bits = from.offset()..from.offset() + from.len();
                (vec![self.bits(&from.buffers()[0], bits)?], Vec::new())
            }
            // Their offset says where their children begin, too.
            DataType::Struct(_)
            | DataType::FixedSizeList(..)
            | DataType::Union(..)
            | DataType::RunEndEncoded(..) => {
                offset = from.offset();
                let buffers: Result<_, _> =
                    from.buffers().iter().map(|buffer| self.whole(buffer)).collect();
                (buffers?, self.children(from)?)
            }
            DataType::Dictionary(..) => {
                (self.fixed(from)?, vec![self.values(&from.child_data()[0])?])
            }
            _ => (self.fixed(from)?, self.children(from)?),
        };
        let nulls = from.nulls().map(|nulls| self.nulls(nulls)).transpose()?;
        let array = ArrayDataBuilder::new(from.data_type().clone())
            .len(from.len())
            .offset(offset)
            .nulls(nulls)
            .buffers(buffers)
            .child_data(children);
        // SAFETY: the parts are those of `from`, which is valid, moved as its layout says; they are aligned to 64 bytes.
        Ok(unsafe { array.build_unchecked() })
    }

    fn children(&mut self, from: &ArrayData) -> Result<Vec<ArrayData>, ArrowError> {
        from.child_data().iter().map(|child| self.array(child)).collect()
    }

    /// The values of a dictionary, which other arrays may have, too.
    fn values(&mut self, from: &ArrayData) -> Result<ArrayData, ArrowError> {
        let first = from.buffers().first();
        let key = (first.map_or(0, |buffer| buffer.as_ptr().addr()), from.len());
        if let Some((_, copy)) = self.values.get(&key).filter(|(other, _)| other.ptr_eq(from)) {
            return Ok(copy.clone());
        }
        let copy = self.array(from)?;
        self.values.insert(key, (from.clone(), copy.clone()));
        Ok(copy)
    }

    fn part(&self, buffer: &Buffer, bytes: Range<usize>) -> Result<Buffer, ArrowError> {
        copy_buffer(&buffer.slice_with_length(bytes.start, bytes.len()), self.to)
    }

    /// All of a buffer that others may have, too.
    fn whole(&mut self, buffer: &Buffer) -> Result<Buffer, ArrowError> {
        let key = (buffer.as_ptr().addr(), buffer.len());
        if let Some((_, copy)) = self.buffers.get(&key) {
            return Ok(copy.clone());
        }
        let copy = copy_buffer(buffer, self.to)?;
        self.buffers.insert(key, (buffer.clone(), copy.clone()));
        Ok(copy)
    }

    /// Bits, of which the first is that of the same number modulo 8 in the copy.
    fn bits(&self, buffer: &Buffer, bits: Range<usize>) -> Result<Buffer, ArrowError> {
        self.part(buffer, bits.start / 8..bits.end.div_ceil(8))
    }

    fn nulls(&self, nulls: &NullBuffer) -> Result<NullBuffer, ArrowError> {
        let (start, len) = (nulls.offset(), nulls.len());
        let bits = self.bits(nulls.buffer(), start..start + len)?;
        let bits = BooleanBuffer::new(bits, start % 8, len);
        // SAFETY: the bits are those that have been counted.
        Ok(unsafe { NullBuffer::new_unchecked(bits, nulls.null_count()) })
    }

    /// Values of one width each, and what they point into: all of that.
    fn fixed(&mut self, from: &ArrayData) -> Result<Vec<Buffer>, ArrowError> {
        let specs = layout(from.data_type()).buffers;
        let mut buffers = Vec::new();
        for (at, buffer) in from.buffers().iter().enumerate() {
            buffers.push(match specs.get(at) {
                Some(BufferSpec::FixedWidth { byte_width, .. }) => {
                    let start = from.offset() * byte_width;
                    self.part(buffer, start..start + from.len() * byte_width)?
                }
                _ => self.whole(buffer)?,
            });
        }
        Ok(buffers)
    }

    /// Offsets that begin at zero, and the range that they were offsets into.
    fn offsets<O: ArrowNativeType>(
        &self,
        from: &ArrayData,
    ) -> Result<(Buffer, Range<usize>), ArrowError> {
        let offsets = if from.is_empty() { &[O::usize_as(0)] } else { from.buffer::<O>(0) };
        let offsets = &offsets[..=from.len()];
        let (first, last) = (offsets[0].as_usize(), offsets[from.len()].as_usize());
        let len = ByteCount(size_of_val(offsets) as u64);
        let mut writer = BufferWriter::with_capacity(self.to, len)?;
        for part in offsets.chunks(512) {
            let mut rebased = [O::default(); 512];
            let rebased = &mut rebased[..part.len()];
            for (to, from) in rebased.iter_mut().zip(part) {
                *to = O::usize_as(from.as_usize() - first);
            }
            writer.extend(rebased)?;
        }
        Ok((writer.finish(), first..last))
    }

    /// Strings and other bytes of variable length.
    fn variable<O: ArrowNativeType>(&self, from: &ArrayData) -> Result<Parts, ArrowError> {
        let (offsets, range) = self.offsets::<O>(from)?;
        Ok((vec![offsets, self.part(&from.buffers()[1], range)?], Vec::new()))
    }

    fn list<O: ArrowNativeType>(&mut self, from: &ArrayData) -> Result<Parts, ArrowError> {
        let (offsets, range) = self.offsets::<O>(from)?;
        // The array's slice: that of a struct's `ArrayData` has an offset and children that are cut already.
        let child = make_array(from.child_data()[0].clone()).slice(range.start, range.len());
        Ok((vec![offsets], vec![self.array(&child.to_data())?]))
    }
}

/// Buffers and children of an array.
type Parts = (Vec<Buffer>, Vec<ArrayData>);
