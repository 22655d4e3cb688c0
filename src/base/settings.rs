//! [`settings!`]: structures of settings, which are set one by one before they are used.

/// Declares a structure of settings with `new`, which gives the defaults, and a method for each
/// setting, documented by what stands above its row. A row is `name: kind(type) = default`; a
/// `value` is set as its type, a `maybe` is an `Option` that is set with or without `Some`.
///
/// Nothing is checked before the settings are used. Fields can be read, but a structure of settings is
/// not written out by its users, so that a setting can be added.
#[allow(unused_macros, reason = "some tests compile a few layers alone")]
macro_rules! settings {
    (
        $(#[$doc:meta])*
        pub struct $Settings:ident {
            $($(#[$row_doc:meta])* $name:ident: $kind:ident($type:ty) = $default:expr,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        #[must_use = "settings do nothing until something is made of them"]
        #[non_exhaustive]
        pub struct $Settings {
            $(
                /// See the method of this name.
                pub $name: $crate::base::settings::settings!(@stored $kind $type),
            )*
        }

        impl Default for $Settings {
            fn default() -> $Settings {
                $Settings { $($name: $default,)* }
            }
        }

        impl $Settings {
            /// Returns the defaults.
            pub fn new() -> $Settings {
                $Settings::default()
            }

            $($crate::base::settings::settings! {
                @method $(#[$row_doc])* $Settings $name $kind $type
            })*
        }
    };
    (@stored value $type:ty) => { $type };
    (@stored maybe $type:ty) => { Option<$type> };
    (@method $(#[$doc:meta])* $Settings:ident $name:ident $kind:ident $type:ty) => {
        $(#[$doc])*
        pub fn $name(mut self, value: $crate::base::settings::settings!(@taken $kind $type)) -> $Settings {
            self.$name = value.into();
            self
        }
    };
    (@taken value $type:ty) => { $type };
    (@taken maybe $type:ty) => { impl Into<Option<$type>> };
}

pub(crate) use settings;
