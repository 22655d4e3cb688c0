//! The command, as users and scripts see it.

mod doctor;
mod top;
