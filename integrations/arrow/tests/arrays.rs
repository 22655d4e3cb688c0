//! Arrays in far memory beside the ordinary ones that they are copies of: equal, aligned, without copies when they are
//! read, and gone with their last reader.

use arrow_array::builder::{
    FixedSizeListBuilder, Int32Builder, ListBuilder, MapBuilder, StringBuilder,
};
use arrow_array::types::{Int32Type, UInt16Type};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, Decimal128Array, DictionaryArray,
    FixedSizeBinaryArray, Float64Array, Int32Array, Int64Array, LargeListArray, LargeStringArray,
    ListArray, ListViewArray, NullArray, RecordBatch, RecordBatchOptions, RunArray, StringArray,
    StringViewArray, StructArray, UInt16Array, UnionArray,
};
use arrow_buffer::{Buffer, NullBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field, Schema, UnionMode};
use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::config::Builder;
use farheap::{ByteCount, Far, Heap, Tier};
use farheap_arrow::{BufferWriter, buffer_of_vec, copy_array, copy_batches, copy_buffer};
use std::sync::{Arc, OnceLock};

/// The heap of this program, or why there is none.
static HEAP: OnceLock<Result<Heap, String>> = OnceLock::new();

fn options(capacity: ByteCount) -> Builder {
    Heap::builder().far_limit(ByteCount::mib(8)).capacity(capacity)
}

/// `None`, with the reason printed, where userfaultfd is not permitted.
fn heap() -> Option<&'static Heap> {
    let start = || match options(ByteCount::mib(256)).start() {
        Ok(heap) => Ok(heap),
        Err(error @ farheap::Error::UffdUnavailable { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    };
    HEAP.get_or_init(start).as_ref().inspect_err(|why| println!("skipped: {why}")).ok()
}

/// A tier for a test that counts: what others have allocated, it does not have.
fn tier(name: &str, capacity: ByteCount) -> Option<Heap> {
    Some(heap()?.add_tier(name, options(capacity)).expect("a tier"))
}

fn far(tier: &Heap) -> Tier {
    tier.tier()
}

const ROWS: i32 = 1000;

/// Null for one row in seven.
fn some<T>(row: i32, value: T) -> Option<T> {
    (row % 7 != 3).then_some(value)
}

fn lists<L: FromIterator<Option<Vec<Option<i32>>>>>() -> L {
    let list = |row: i32| (row..row + row % 5).map(|value| some(value, value)).collect();
    (0..ROWS).map(|row| some(row, list(row))).collect()
}

/// Arrays of all layouts, with nulls.
fn arrays() -> Vec<ArrayRef> {
    let rows = || 0..ROWS;
    let text = |row: i32| format!("a text of some length, number {}", row * row);
    let strings: StringArray = rows().map(|row| some(row, text(row))).collect();
    let dictionary: DictionaryArray<UInt16Type> =
        rows().map(|row| some(row, ["red", "green", "blue"][row as usize % 3])).collect();
    let numbers: Int32Array = rows().map(|row| some(row, row)).collect();
    let nested = StructArray::from(vec![
        (Arc::new(Field::new("a", DataType::Int32, true)), Arc::new(numbers.clone()) as ArrayRef),
        (Arc::new(Field::new("b", DataType::Utf8, true)), Arc::new(strings.clone()) as ArrayRef),
    ]);
    let mut pairs = FixedSizeListBuilder::new(Int32Builder::new(), 2);
    let mut maps = MapBuilder::new(None, StringBuilder::new(), Int32Builder::new());
    let mut deep = ListBuilder::new(ListBuilder::new(StringBuilder::new()));
    for row in rows() {
        pairs.values().append_value(row);
        pairs.values().append_option(some(row, 2 * row));
        pairs.append(row % 5 != 0);
        for key in 0..row % 4 {
            maps.keys().append_value(text(key));
            maps.values().append_option(some(row, key));
        }
        maps.append(row % 6 != 0).expect("as many keys as values");
        for inner in 0..row % 3 {
            deep.values().values().append_value(text(inner));
            deep.values().append(inner % 2 == 0);
        }
        deep.append(true);
    }
    let runs = RunArray::try_new(
        &Int32Array::from_iter_values((1..=ROWS / 10).map(|run| 10 * run)),
        &StringArray::from_iter_values((0..ROWS / 10).map(text)),
    );
    let fixed = FixedSizeBinaryArray::try_from_iter(rows().map(|row| row.to_le_bytes()));
    let lists_of = lists::<ListArrayOf>().0;
    vec![
        Arc::new(union(&numbers, &strings, false)),
        Arc::new(union(&numbers, &strings, true)),
        Arc::new(fixed.expect("four bytes each")),
        Arc::new(ListViewArray::from(lists_of.clone())),
        Arc::new(numbers),
        Arc::new(Float64Array::from_iter(rows().map(|row| some(row, f64::from(row))))),
        Arc::new(Decimal128Array::from_iter_values(rows().map(|row| i128::from(row) << 70))),
        Arc::new(BooleanArray::from_iter(rows().map(|row| some(row, row % 3 == 0)))),
        Arc::new(strings),
        Arc::new(LargeStringArray::from_iter(rows().map(|row| some(row, text(row))))),
        Arc::new(BinaryArray::from_iter(rows().map(|row| some(row, row.to_le_bytes())))),
        Arc::new(StringViewArray::from_iter(rows().map(|row| some(row, text(row))))),
        Arc::new(dictionary),
        Arc::new(lists_of),
        Arc::new(lists::<LargeListArrayOf>().0),
        Arc::new(nested),
        Arc::new(pairs.finish()),
        Arc::new(maps.finish()),
        Arc::new(deep.finish()),
        Arc::new(runs.expect("runs in order")),
        Arc::new(NullArray::new(ROWS as usize)),
    ]
}

/// Numbers and strings in turns: of children that are as long as the union, or as there are rows of each.
fn union(numbers: &Int32Array, strings: &StringArray, is_dense: bool) -> UnionArray {
    let fields = [
        (0, Arc::new(Field::new("number", DataType::Int32, true))),
        (1, Arc::new(Field::new("string", DataType::Utf8, true))),
    ];
    let kinds = (0..ROWS).map(|row| (row % 2) as i8).collect::<ScalarBuffer<i8>>();
    let offsets = is_dense.then(|| (0..ROWS).map(|row| row / 2).collect::<ScalarBuffer<i32>>());
    let children = vec![Arc::new(numbers.clone()) as ArrayRef, Arc::new(strings.clone()) as _];
    UnionArray::try_new(fields.into_iter().collect(), kinds, offsets, children).expect("a union")
}

/// Lists of numbers, collected.
struct ListArrayOf(ListArray);
struct LargeListArrayOf(LargeListArray);

impl FromIterator<Option<Vec<Option<i32>>>> for ListArrayOf {
    fn from_iter<I: IntoIterator<Item = Option<Vec<Option<i32>>>>>(lists: I) -> Self {
        ListArrayOf(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))
    }
}

impl FromIterator<Option<Vec<Option<i32>>>> for LargeListArrayOf {
    fn from_iter<I: IntoIterator<Item = Option<Vec<Option<i32>>>>>(lists: I) -> Self {
        LargeListArrayOf(LargeListArray::from_iter_primitive::<Int32Type, _, _>(lists))
    }
}

/// All buffers of an array that have bytes.
fn buffers(data: &ArrayData) -> Vec<Buffer> {
    let own = data.buffers().iter().cloned();
    let nulls = data.nulls().map(|nulls| nulls.buffer().clone());
    let children = data.child_data().iter().flat_map(buffers);
    own.chain(nulls).chain(children).filter(|buffer| !buffer.is_empty()).collect()
}

/// Fails unless a copy is equal, valid, aligned and in a tier.
fn check(copy: &dyn Array, original: &dyn Array, tier: &Heap) {
    let data = copy.to_data();
    data.validate_full().unwrap_or_else(|error| panic!("{}: {error}", copy.data_type()));
    assert_eq!(copy, original, "{}", copy.data_type());
    assert_eq!(copy.null_count(), original.null_count(), "{}", copy.data_type());
    for buffer in buffers(&data) {
        assert_eq!(Tier::of(buffer.as_ptr()), Some(tier.tier()), "{}", copy.data_type());
        assert_eq!(buffer.data_ptr().addr().get() % 64, 0, "{}", copy.data_type());
    }
}

#[test]
fn copies_of_all_layouts_are_equal_and_aligned() {
    let Some(tier) = heap() else { return };
    for array in arrays() {
        let copy = copy_array(&array, far(tier)).expect("room");
        check(&copy, &array, tier);
        let back = copy_array(&copy, Tier::LOCAL).expect("room");
        assert_eq!(&back, &array);
        assert!(buffers(&back.to_data()).iter().all(|buffer| !Far::contains(buffer.as_ptr())));
    }
}

#[test]
fn copies_of_slices_show_what_the_slices_show() {
    let Some(tier) = heap() else { return };
    for array in arrays() {
        for (start, len) in [(0, 0), (0, 1), (1, 9), (8, 16), (13, 500), (997, 3), (1000, 0)] {
            let slice = array.slice(start, len);
            let copy = copy_array(&slice, far(tier)).expect("room");
            check(&copy, &slice, tier);
            // A slice of the copy, and a copy of that.
            let inner = copy.slice(len / 3, len / 2);
            assert_eq!(&inner, &slice.slice(len / 3, len / 2));
            check(&copy_array(&inner, far(tier)).expect("room"), &inner, tier);
        }
    }
}

#[test]
fn of_a_slice_only_what_it_shows_is_copied() {
    let Some(tier) = heap() else { return };
    let bytes = |array: &dyn Array| -> usize {
        buffers(&array.to_data()).iter().map(Buffer::len).sum::<usize>()
    };
    for array in arrays() {
        let copy = copy_array(&array.slice(500, 10), far(tier)).expect("room");
        let keeps_all = matches!(
            array.data_type(),
            DataType::Utf8View
                | DataType::Dictionary(..)
                | DataType::ListView(..)
                | DataType::Union(_, UnionMode::Dense)
                | DataType::RunEndEncoded(..)
                | DataType::Null
        );
        let (part, all) = (bytes(&copy), bytes(&array));
        assert!(keeps_all || part < all / 20, "{}: {part} of {all}", array.data_type());
    }
}

#[test]
fn batches_come_back_as_they_went_and_share_what_they_shared() {
    let Some(tier) = heap() else { return };
    let columns = arrays();
    let fields = columns
        .iter()
        .enumerate()
        .map(|(at, column)| Field::new(format!("column {at}"), column.data_type().clone(), true));
    let schema = Arc::new(Schema::new(fields.collect::<Vec<_>>()));
    let batch = RecordBatch::try_new(schema, columns).expect("a batch");
    let batches: Vec<_> = (0..10).map(|part| batch.slice(100 * part, 100)).collect();
    let copies = copy_batches(&batches, far(tier)).expect("room");
    assert_eq!(copies, batches);
    let dictionary = |batch: &RecordBatch| {
        let column = batch.column(12).as_any().downcast_ref::<DictionaryArray<UInt16Type>>();
        column.expect("the dictionary").values().to_data()
    };
    assert!(dictionary(&copies[9]).ptr_eq(&dictionary(&copies[0])), "copied once");
    assert_eq!(copy_batches(&copies, Tier::LOCAL).expect("room"), batches);

    let without_columns = RecordBatch::try_new_with_options(
        Arc::new(Schema::empty()),
        Vec::new(),
        &RecordBatchOptions::new().with_row_count(Some(7)),
    );
    let without_columns = without_columns.expect("a batch");
    let copies = copy_batches(std::slice::from_ref(&without_columns), far(tier)).expect("room");
    assert_eq!(copies[0].num_rows(), 7);
}

#[test]
fn buffers_live_as_long_as_the_last_array_that_uses_them() {
    const LEN: i64 = 3 << 20;
    let Some(tier) = tier("lives", ByteCount::mib(256)) else { return };
    let allocated = || tier.usage().allocated_bytes.0;
    let none = allocated();
    let mut writer = BufferWriter::new(far(&tier));
    for start in (0..LEN).step_by(1 << 10) {
        let values: Vec<i64> = (start..start + (1 << 10)).collect();
        writer.extend(&values).expect("room");
    }
    assert_eq!(writer.len(), ByteCount(8 * LEN as u64));
    let buffer = writer.finish();
    let start = buffer.as_ptr();
    let array = Int64Array::new(buffer.into(), None);
    assert_eq!(array.values().as_ptr().cast(), start, "no copies");
    let slice = array.slice(1 << 20, 1 << 20);
    let deep = slice.slice(5, 10);
    drop(array);
    assert!(slice.values().iter().copied().eq(1 << 20..2 << 20), "24 MiB in 8");
    drop(slice);
    assert!(allocated() - none >= 8 * LEN as u64, "a slice holds all of it");
    assert_eq!(deep.value(9), (1 << 20) + 14);
    drop(deep);
    assert!(allocated() - none < 1 << 20, "{} bytes are left", allocated() - none);
    let stats = tier.stats();
    assert!(stats.resident_bytes_max <= stats.limit_bytes, "{stats}");
    assert!(stats.bytes_written > ByteCount::mib(8), "the limit was at work: {stats}");
}

#[test]
fn vectors_become_buffers_where_they_are() {
    let Some(tier) = tier("vectors", ByteCount::mib(256)) else { return };
    let none = tier.usage().allocated_bytes.0;
    let mut values: FarVec<u16, Tier> = FarVec::with_capacity_in(5000, tier.tier());
    values.extend(0..3000);
    let start = values.as_ptr();
    let array = UInt16Array::new(buffer_of_vec(values).into(), Some(NullBuffer::new_valid(3000)));
    assert_eq!(array.values().as_ptr(), start);
    assert_eq!(array, UInt16Array::from_iter((0..3000).map(Some)));
    drop(array);
    assert_eq!(tier.usage().allocated_bytes.0, none);
    let nothing = buffer_of_vec(FarVec::<i64, Tier>::new_in(tier.tier()));
    assert_eq!(Int64Array::new(nothing.into(), None).len(), 0);
}

#[test]
fn nothing_has_a_buffer_of_no_bytes() {
    let Some(tier) = heap() else { return };
    let empty = BufferWriter::new(far(tier));
    assert!(empty.is_empty());
    let empty = empty.finish();
    assert_eq!((empty.len(), empty.as_ptr().addr() % 64), (0, 0));
    assert_eq!(Int64Array::new(empty.into(), None).len(), 0);
    let mut none = BufferWriter::with_capacity(far(tier), ByteCount::ZERO).expect("no bytes");
    none.extend::<i64>(&[]).expect("no bytes");
    assert!(none.finish().is_empty());
    assert!(copy_buffer(&Buffer::default(), far(tier)).expect("no bytes").is_empty());
    assert!(copy_batches(&[], far(tier)).expect("no batches").is_empty());
}

#[test]
fn memory_that_is_refused_is_an_error_and_leaves_nothing() {
    let Some(tier) = tier("full", ByteCount::mib(16)) else { return };
    let none = tier.usage().allocated_bytes.0;
    let array = Int64Array::from_iter_values(0..4 << 20);
    let error = copy_array(&array, far(&tier)).expect_err("32 MiB do not fit");
    assert!(matches!(&error, ArrowError::MemoryError(_)), "{error}");
    let batch = RecordBatch::try_from_iter([("a", Arc::new(array.slice(0, 1 << 20)) as ArrayRef)]);
    let batches = vec![batch.expect("a batch"); 4];
    assert!(copy_batches(&batches, far(&tier)).is_err(), "32 MiB in parts do not fit, either");
    let mut writer = BufferWriter::new(far(&tier));
    while writer.extend(&[7_u8; 4096]).is_ok() {}
    let len = writer.len();
    assert!(len >= ByteCount::mib(4), "{len}");
    let buffer = writer.finish();
    assert!(buffer.iter().all(|byte| *byte == 7), "what was written before is there");
    drop(buffer);
    let left = tier.usage().allocated_bytes.0 - none;
    assert!(left < 1 << 20, "{left} bytes are left");
}
