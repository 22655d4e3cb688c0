//! Statistics: structures that follow from the library's tables.

#![expect(unsafe_code, reason = "writes to the caller's structures")]

use crate::error::{Result, write_sized};
use crate::manager::FARHEAP_NAME_MAX;
use farheap::manager::{ConsumerStats, ManagerStats};
use farheap::pool::PoolStats;
use farheap::{Stats, Usage};
use std::ffi::c_char;
use std::mem::offset_of;

/// A structure as the header has it.
#[doc(hidden)]
#[derive(Debug)]
pub struct Structure {
    pub name: &'static str,
    pub size: usize,
    pub fields: Vec<Field>,
}

/// A field behind the structure's size: its name and type in Rust, where it is, and what it says.
#[doc(hidden)]
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: &'static str,
    pub offset: usize,
    pub documentation: &'static str,
}

/// Declares a structure: its size, fields that only C has, and those of a table.
macro_rules! structure {
    (
        (
            $(#[$doc:meta])*
            $Structure:ident of $Stats:ident {
                $($(#[doc = $own_doc:literal])* $own:ident: $own_type:ty,)*
            }
        )
        $($label:literal {
            $($(#[doc = $row_doc:literal])* $row:ident: $kind:ident $words:literal;)*
        })*
    ) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $Structure {
            pub size: usize,
            $(pub $own: $own_type,)*
            $($(pub $row: u64,)*)*
        }

        impl $Structure {
            pub(crate) fn new($($own: $own_type,)* stats: &$Stats) -> $Structure {
                $Structure {
                    size: size_of::<$Structure>(),
                    $($own,)*
                    $($($row: stats.$row.into(),)*)*
                }
            }

            /// Writes as many fields as the caller's structure has.
            ///
            /// # Safety
            /// As for [`write_sized`].
            pub(crate) unsafe fn write(&self, out: *mut $Structure) -> Result<()> {
                // Every caller's structure has the table's first field.
                const MIN: usize = [$($(offset_of!($Structure, $row)),*),*][0] + size_of::<u64>();
                // SAFETY: as the caller promises.
                unsafe { write_sized(out, self, MIN) }
            }

            fn structure() -> Structure {
                let fields = vec![
                    $(Field {
                        name: stringify!($own),
                        kind: stringify!($own_type),
                        offset: offset_of!($Structure, $own),
                        documentation: concat!($($own_doc),*),
                    },)*
                    $($(Field {
                        name: stringify!($row),
                        kind: "u64",
                        offset: offset_of!($Structure, $row),
                        documentation: concat!($($row_doc),*),
                    },)*)*
                ];
                let (name, size) = (stringify!($Structure), size_of::<$Structure>());
                Structure { name, size, fields }
            }
        }
    };
}

farheap::for_region_stats!(structure (
    /// Statistics of a heap or a collective.
    farheap_stats of Stats {
        /// Bytes that are allocated, as callers asked for them.
        allocated_bytes: u64,
    }
));

farheap::for_usage!(structure (
    /// Uses of a tier's memory.
    farheap_usage of Usage {}
));

farheap::for_manager_stats!(structure (
    /// Statistics of a memory manager.
    farheap_manager_stats of ManagerStats {}
));

farheap::for_consumer_stats!(structure (
    /// Statistics of one consumer.
    farheap_consumer_stats of ConsumerStats {
        /// "temporary", "pool", "far heap", or as an account was named.
        name: [c_char; FARHEAP_NAME_MAX],
    }
));

farheap::for_pool_stats!(structure (
    /// Statistics of a pool.
    farheap_pool_stats of PoolStats {
        /// Fixes at the moment.
        holders: u64,
    }
));

/// All of them, for the header.
#[doc(hidden)]
#[must_use]
pub fn structures() -> [Structure; 5] {
    [
        farheap_stats::structure(),
        farheap_usage::structure(),
        farheap_manager_stats::structure(),
        farheap_consumer_stats::structure(),
        farheap_pool_stats::structure(),
    ]
}
