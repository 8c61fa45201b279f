//! Place: where a store is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use steadfast::store::postgres::{PostgresReader, is_postgres};
use steadfast::store::sqlite::SqliteReader;
use steadfast::store::{Reader, StoreError};

use crate::exit::Exit;

/// The variable that stands for `--store`.
pub const VARIABLE: &str = "STEADFAST_STORE";
/// Where the store is when nobody says it.
const FOLDER: &str = "./steadfast-data";

/// `--data DIR` or `--store URL`.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Folder of the embedded store [default: ./steadfast-data].
    #[arg(long, value_name = "DIR", conflicts_with = "store")]
    data: Option<PathBuf>,
    /// The store itself: sqlite:PATH, or postgres://USER:PASSWORD@HOST/DATABASE?schema=NAME. Where neither this nor --data
    /// is given, the environment's STEADFAST_STORE stands for it.
    // Not read by clap, to which it would be as good as given, and refused beside a --data that is.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
}

/// The store that the environment names.
///
/// # Errors
/// When it is no text.
pub fn from_environment() -> Result<Option<String>, Exit> {
    match std::env::var(VARIABLE) {
        Ok(url) => Ok(Some(url).filter(|url| !url.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(Exit::refused("invalid_store", format!("{VARIABLE} is not UTF-8; give sqlite:PATH or postgres://..")))
        }
    }
}

/// A store, by what holds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum At {
    /// An SQLite file.
    File(PathBuf),
    /// A PostgreSQL database, by its URL.
    Postgres(String),
}

impl At {
    /// Reads a URL, or a path.
    ///
    /// # Errors
    /// For a URL of another kind.
    pub fn read(url: &str) -> Result<Self, Exit> {
        if is_postgres(url) {
            return Ok(Self::Postgres(url.to_owned()));
        }
        match url.split_once(':') {
            Some(("sqlite", path)) => Ok(Self::File(PathBuf::from(path.strip_prefix("//").unwrap_or(path)))),
            Some((scheme, _)) if !Path::new(url).exists() && !scheme.contains('/') => Err(Exit::refused(
                "invalid_store",
                format!(
                    "the store has the scheme {scheme}, which this release cannot open; give sqlite:PATH or postgres://.."
                ),
            )),
            _ => Ok(Self::File(PathBuf::from(url))),
        }
    }

    /// The URL.
    pub fn url(&self) -> String {
        match self {
            Self::File(path) => format!("sqlite:{}", path.display()),
            Self::Postgres(url) => url.clone(),
        }
    }

    /// How it is shown: without a password.
    pub fn shown(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Postgres(url) => steadfast::store::postgres::Place::parse(url)
                .map_or_else(|_| "a PostgreSQL database".to_owned(), |place| place.to_string()),
        }
    }

    /// Opens it for reading only.
    ///
    /// # Errors
    /// When there is no store.
    pub fn reader(&self) -> Result<Arc<dyn Reader>, StoreError> {
        Ok(match self {
            Self::File(path) => Arc::new(SqliteReader::open(path)?),
            Self::Postgres(url) => Arc::new(PostgresReader::open(url)?),
        })
    }
}

impl Place {
    /// Where it is.
    ///
    /// # Errors
    /// For a URL of a kind that cannot be opened.
    pub fn at(&self) -> Result<At, Exit> {
        let in_folder = |folder: &Path| At::File(folder.join("steadfast.db"));
        match (&self.store, &self.data) {
            (Some(url), _) => At::read(url),
            (None, Some(folder)) => Ok(in_folder(folder)),
            (None, None) => match from_environment()? {
                Some(url) => At::read(&url),
                None => Ok(in_folder(Path::new(FOLDER))),
            },
        }
    }
}
