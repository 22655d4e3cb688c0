//! Far memory on a server, and faults in it.
#![expect(unsafe_code, reason = "touches pages of a region")]

use crate::common::Dice;
use crate::servers::Server;
use crate::{Failure, PAGE, Result};
use farheap::region::{Advice, Region, RegionConfig};
use farheap::store::BlockStore;
use farheap::{ByteCount, Heap};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

const PAGES: u64 = (64 << 20) / PAGE as u64;
const LIMIT: ByteCount = ByteCount::mib(16);

/// Pages with a number each, four times as many as the limit takes.
pub(crate) struct Far {
    owner: Owner,
    pages: NonNull<u8>,
}

enum Owner {
    Heap(Heap),
    Region(Box<Region>),
}

impl Far {
    /// With more of the configuration than limit and device.
    pub(crate) fn on_server(server: &Server, more: &str) -> Result<Far> {
        let conf = format!("far_limit:{LIMIT},device:\"{}\"{more}", server.address);
        let heap = Heap::builder().parse(&conf).and_then(|builder| builder.start());
        Far::of(Owner::Heap(heap.map_err(Failure::of)?))
    }

    pub(crate) fn on_disk(device: &std::path::Path) -> Result<Far> {
        Far::on_store(BlockStore::open(device, None).map_err(Failure::of)?)
    }

    /// Where pages go by default.
    pub(crate) fn on_file() -> Result<Far> {
        Far::on_store(BlockStore::temporary(None, Some(ByteCount::mib(256))).map_err(Failure::of)?)
    }

    fn on_store(store: BlockStore) -> Result<Far> {
        let config = RegionConfig::new().limit(LIMIT).span(ByteCount::mib(128));
        let region = Region::create(config, Arc::new(store)).map_err(Failure::of)?;
        Far::of(Owner::Region(Box::new(region)))
    }

    fn of(owner: Owner) -> Result<Far> {
        let region = owner.region();
        let len = ByteCount(PAGES * PAGE as u64);
        let pages: NonNull<u8> = region.map(len).map_err(Failure::of)?.cast();
        let far = Far { pages, owner };
        for at in 0..PAGES {
            // SAFETY: within the mapping, which nothing else uses.
            unsafe { far.page(at).write_volatile(at) };
        }
        // SAFETY: the mapping is that long, and all of it is written.
        let all = unsafe { std::slice::from_raw_parts(pages.as_ptr(), len.as_usize()) };
        far.owner.region().advise(&[all], Advice::PageOutNow).map_err(Failure::of)?;
        Ok(far)
    }

    fn page(&self, at: u64) -> *mut u64 {
        self.pages.as_ptr().wrapping_add(at as usize * PAGE).cast()
    }

    /// Microseconds within which half of the reads end that fault, of pages in no order.
    pub(crate) fn p50(&self, count: u64) -> Result<f64> {
        /// What is faster found its page in memory.
        const HIT_US: f64 = 2.0;
        let mut dice = Dice(count);
        let mut times = Vec::new();
        while (times.len() as u64) < count {
            let at = dice.below(PAGES);
            let start = Instant::now();
            // SAFETY: within the mapping, which nothing else uses.
            let number = unsafe { self.page(at).read_volatile() };
            let time = start.elapsed().as_secs_f64() * 1e6;
            assert_eq!(number, at);
            if time > HIT_US {
                times.push(time);
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }

    pub(crate) fn end(self) -> Result<()> {
        match self.owner {
            Owner::Heap(heap) => heap.shutdown().map_err(Failure::of),
            Owner::Region(_) => Ok(()),
        }
    }
}

impl Owner {
    fn region(&self) -> &Region {
        match self {
            Owner::Heap(heap) => heap.region(),
            Owner::Region(region) => region,
        }
    }
}
