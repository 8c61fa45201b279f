//! A database of one test, of any kind that a store can lie in.

use std::path::PathBuf;

use tempfile::TempDir;

use crate::shared::{Shared, shared};

/// An empty database of one test: a folder for a file, or a schema of the shared cluster. A scenario takes one as its
/// parameter, [`on_each_database!`](crate::on_each_database) makes a test of it for each kind.
#[derive(Debug)]
pub struct Database(Kind);

#[derive(Debug)]
enum Kind {
    Postgres { url: String, _shared: Shared },
    Sqlite(TempDir),
}

impl Database {
    /// A schema that nobody has used before.
    pub fn postgres() -> Self {
        let shared = shared();
        Self(Kind::Postgres { url: shared.fresh_url(), _shared: shared })
    }

    /// A file that is not there yet.
    pub fn sqlite() -> Self {
        Self(Kind::Sqlite(TempDir::new().expect("a folder for tests")))
    }

    /// One more of the same kind.
    pub fn another(&self) -> Self {
        match &self.0 {
            Kind::Postgres { .. } => Self::postgres(),
            Kind::Sqlite(_) => Self::sqlite(),
        }
    }

    /// What a store in it is opened with.
    pub fn url(&self) -> String {
        match &self.0 {
            Kind::Postgres { url, .. } => url.clone(),
            Kind::Sqlite(folder) => format!("sqlite:{}", folder.path().join("steadfast.db").display()),
        }
    }

    /// The path of the file, where it is one.
    pub fn file(&self) -> Option<PathBuf> {
        match &self.0 {
            Kind::Postgres { .. } => None,
            Kind::Sqlite(folder) => Some(folder.path().join("steadfast.db")),
        }
    }
}

/// Makes a test of each scenario for each database: `on_postgres::NAME` and `on_sqlite::NAME`.
///
/// A scenario is a function that takes a [`Database`]; one that is missing here is told as dead code. Once a module:
///
/// ```text
/// on_each_database! {
///     #[tokio::test] async:      or `#[test]:` when the scenarios are not async
///     a_sleep_ends,
///     a_start_runs,
/// }
///
/// async fn a_sleep_ends(database: Database) { .. }
/// ```
#[macro_export]
macro_rules! on_each_database {
    (#[$test:meta] async: $($scenario:ident),+ $(,)?) => {
        mod on_postgres {
            $(#[$test] async fn $scenario() { super::$scenario($crate::Database::postgres()).await; })+
        }

        mod on_sqlite {
            $(#[$test] async fn $scenario() { super::$scenario($crate::Database::sqlite()).await; })+
        }
    };
    (#[$test:meta]: $($scenario:ident),+ $(,)?) => {
        mod on_postgres {
            $(#[$test] fn $scenario() { super::$scenario($crate::Database::postgres()); })+
        }

        mod on_sqlite {
            $(#[$test] fn $scenario() { super::$scenario($crate::Database::sqlite()); })+
        }
    };
}
