//! Columnar tables in pages of the pool.
//!
//! A column is an array of fixed-width values in data pages; where they are, directory pages say,
//! which are in the pool too. A bitmap column tells which rows are visible. Rows are only added;
//! what is deleted or rolled back becomes invisible.

use farheap::pool::BufferPool;
use farheap::{PageId, Result};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Directory pages of a column: with 4 KiB pages, 2 GB of data.
const DIRECTORY_MAX: usize = 512;

/// Bytes of an entry in a directory page.
const ENTRY: usize = 4;

/// Pages asked for at once by a scan.
const GROUP: usize = 32;

/// Values of one width, by row number.
pub(crate) struct Column {
    width: usize,
    per_page: u64,
    per_directory: u64,
    directory: Box<[AtomicU32]>,
    grow: Mutex<()>,
}

impl Clone for Column {
    fn clone(&self) -> Column {
        let copy = |entry: &AtomicU32| AtomicU32::new(entry.load(Ordering::Acquire));
        Column {
            directory: self.directory.iter().map(copy).collect(),
            grow: Mutex::new(()),
            ..*self
        }
    }
}

impl Column {
    fn new(pool: &BufferPool, width: usize) -> Column {
        Column {
            width,
            per_page: (pool.payload() / width) as u64,
            per_directory: (pool.payload() / ENTRY) as u64,
            directory: (0..DIRECTORY_MAX).map(|_| AtomicU32::new(0)).collect(),
            grow: Mutex::new(()),
        }
    }

    /// The page of a row, and where in it the value begins; page 0 when there is none yet.
    fn find(&self, pool: &BufferPool, row: u64) -> Result<(PageId, usize)> {
        let page = self.nth_page(pool, row / self.per_page)?;
        Ok((page, (row % self.per_page) as usize * self.width))
    }

    fn nth_page(&self, pool: &BufferPool, nth: u64) -> Result<PageId> {
        let slot = &self.directory[(nth / self.per_directory) as usize];
        let directory = slot.load(Ordering::Acquire);
        if directory == 0 {
            return Ok(PageId(0));
        }
        let at = (nth % self.per_directory) as usize * ENTRY;
        let page = pool.read_optimistic(PageId(directory.into()), |page| page.u32(at))?;
        Ok(PageId(page.expect("an entry lies within its page").into()))
    }

    /// Makes sure that a row has a page; allocates `extent` of them at once.
    fn make_room(&self, pool: &BufferPool, row: u64, extent: u64) -> Result<()> {
        if self.find(pool, row)?.0.0 != 0 {
            return Ok(());
        }
        let _alone = self.grow.lock().expect("no panic while a column grows");
        if self.find(pool, row)?.0.0 != 0 {
            return Ok(());
        }
        let first = row / self.per_page / extent * extent;
        for nth in first..first + extent {
            let slot = &self.directory[(nth / self.per_directory) as usize];
            if slot.load(Ordering::Acquire) == 0 {
                slot.store(pool.allocate()?.id().0 as u32, Ordering::Release);
            }
            // Never two latches at a time: `allocate` may have to evict.
            let id = pool.allocate()?.id().0 as u32;
            let directory = PageId(slot.load(Ordering::Acquire).into());
            let at = (nth % self.per_directory) as usize * ENTRY;
            pool.fix_exclusive(directory)?[at..at + ENTRY].copy_from_slice(&id.to_le_bytes());
        }
        Ok(())
    }

    pub(crate) fn read(&self, pool: &BufferPool, row: u64, into: &mut [u8]) -> Result<()> {
        let (page, at) = self.find(pool, row)?;
        pool.read_optimistic(page, |page| page.copy_to(at, into))?.expect("within the page");
        Ok(())
    }

    pub(crate) fn get_u32(&self, pool: &BufferPool, row: u64) -> Result<u32> {
        let (page, at) = self.find(pool, row)?;
        Ok(pool.read_optimistic(page, |page| page.u32(at))?.expect("within the page"))
    }

    pub(crate) fn get_i64(&self, pool: &BufferPool, row: u64) -> Result<i64> {
        let (page, at) = self.find(pool, row)?;
        let value = pool.read_optimistic(page, |page| page.u64(at))?;
        Ok(value.expect("within the page") as i64)
    }

    /// Changes a value under the page's latch.
    pub(crate) fn update<T>(
        &self,
        pool: &BufferPool,
        row: u64,
        change: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T> {
        let (page, at) = self.find(pool, row)?;
        let mut page = pool.fix_exclusive(page)?;
        Ok(change(&mut page[at..at + self.width]))
    }

    /// Adds to a four-byte value; returns the old one.
    pub(crate) fn add_u32(&self, pool: &BufferPool, row: u64, by: i32) -> Result<u32> {
        self.update(pool, row, |bytes| {
            let old = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            bytes.copy_from_slice(&old.wrapping_add_signed(by).to_le_bytes());
            old
        })
    }

    pub(crate) fn add_i64(&self, pool: &BufferPool, row: u64, by: i64) -> Result<()> {
        self.update(pool, row, |bytes| {
            let old = i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            bytes.copy_from_slice(&(old + by).to_le_bytes());
        })
    }

    /// Copies the values of consecutive rows, one after the other.
    fn scan(&self, pool: &BufferPool, rows: Range<u64>, into: &mut Vec<u8>) -> Result<()> {
        into.clear();
        if rows.is_empty() {
            return Ok(());
        }
        let pages: Vec<u64> =
            (rows.start / self.per_page..=(rows.end - 1) / self.per_page).collect();
        for group in pages.chunks(GROUP) {
            let ids = group.iter().map(|nth| self.nth_page(pool, *nth));
            let ids = ids.collect::<Result<Vec<_>>>()?;
            for (nth, page) in group.iter().zip(pool.fix_many(&ids)?) {
                let from = rows.start.max(nth * self.per_page) % self.per_page;
                let to = (rows.end - nth * self.per_page).min(self.per_page);
                into.extend_from_slice(&page[from as usize * self.width..to as usize * self.width]);
            }
        }
        Ok(())
    }

    /// Copies the values of some rows, in ascending order.
    pub(crate) fn gather(&self, pool: &BufferPool, rows: &[u64], into: &mut Vec<u8>) -> Result<()> {
        into.clear();
        let mut pages: Vec<u64> = rows.iter().map(|row| row / self.per_page).collect();
        pages.dedup();
        let mut rows = rows.iter().peekable();
        for group in pages.chunks(GROUP) {
            let ids = group.iter().map(|nth| self.nth_page(pool, *nth));
            let ids = ids.collect::<Result<Vec<_>>>()?;
            for (nth, page) in group.iter().zip(pool.fix_many(&ids)?) {
                while let Some(row) = rows.next_if(|row| *row / self.per_page == *nth) {
                    let at = (row % self.per_page) as usize * self.width;
                    into.extend_from_slice(&page[at..at + self.width]);
                }
            }
        }
        Ok(())
    }
}

/// Columns, visibility and the number of rows.
pub(crate) struct Table {
    pub(crate) columns: Vec<Column>,
    visible: Column,
    rows: AtomicU64,
    /// Rows there were after the load.
    pub(crate) loaded: u64,
}

impl Clone for Table {
    fn clone(&self) -> Table {
        Table {
            columns: self.columns.clone(),
            visible: self.visible.clone(),
            rows: AtomicU64::new(self.rows()),
            loaded: self.loaded,
        }
    }
}

impl Table {
    pub(crate) fn new(pool: &BufferPool, widths: &[usize]) -> Table {
        Table {
            columns: widths.iter().map(|width| Column::new(pool, *width)).collect(),
            visible: Column::new(pool, 1),
            rows: AtomicU64::new(0),
            loaded: 0,
        }
    }

    /// Rows, visible or not; the newest may be incomplete.
    pub(crate) fn rows(&self) -> u64 {
        self.rows.load(Ordering::Acquire)
    }

    /// Adds an invisible row; `extent` pages are allocated at once where one is missing.
    pub(crate) fn append(&self, pool: &BufferPool, values: &[&[u8]], extent: u64) -> Result<u64> {
        assert_eq!(values.len(), self.columns.len(), "a value for each column");
        let row = self.rows.fetch_add(1, Ordering::AcqRel);
        self.visible.make_room(pool, row / 8, 1)?;
        for (column, value) in self.columns.iter().zip(values) {
            column.make_room(pool, row, extent)?;
            column.update(pool, row, |bytes| bytes.copy_from_slice(value))?;
        }
        Ok(row)
    }

    pub(crate) fn set_visible(&self, pool: &BufferPool, row: u64, visible: bool) -> Result<()> {
        self.visible.update(pool, row / 8, |byte| {
            let bit = 1 << (row % 8);
            byte[0] = if visible { byte[0] | bit } else { byte[0] & !bit };
        })
    }

    /// The visible rows of a range, in order.
    pub(crate) fn visible(&self, pool: &BufferPool, rows: Range<u64>) -> Result<Vec<u64>> {
        let mut bits = Vec::new();
        let first = rows.start / 8;
        // The newest rows may have no bits yet.
        let mut end = rows.end.div_ceil(8);
        while end > first && self.visible.find(pool, end - 1)?.0.0 == 0 {
            end -= 1;
        }
        self.visible.scan(pool, first..end, &mut bits)?;
        let is_set = |row: &u64| {
            let byte = bits.get((row / 8 - first) as usize).copied().unwrap_or(0);
            byte >> (row % 8) & 1 == 1
        };
        Ok(rows.filter(is_set).collect())
    }
}
