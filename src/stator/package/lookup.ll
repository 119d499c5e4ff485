; An operator of eager mode that finds its compiled kernel by its arguments, as a builtin of Python.
;
; The arguments make a key, a row of words: a tensor gives its type, sizes and strides, a number
; itself, a text its bytes, a list its length and what its items give.  Torch's default type stands
; before them; names of keywords, and then their values, stand behind.  A table, which Python fills,
; has the kernels' keys; what is not in it goes to a function of Python's.  `self` is a tuple whose
; first item, bytes, holds the addresses in %operator.

%operator = type { ptr, ptr }  ; the table, and the function that is called where it has nothing
%table = type { i64, ptr }  ; how many slots (a power of two), and the slots
%slot = type { i64, i64, ptr, ptr, ptr, i64 }  ; hash, words, key, function, container, outputs

declare i32 @aoti_torch_get_dtype(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_dim(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_sizes(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_strides(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_device_type(ptr, ptr) nonlazybind
declare i32 @aoti_torch_get_layout(ptr, ptr) nonlazybind
declare i32 @aoti_torch_delete_tensor_object(ptr) nonlazybind
declare i32 @memcmp(ptr, ptr, i64) nonlazybind
declare ptr @memcpy(ptr, ptr, i64) nonlazybind
declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare i64 @PyLong_AsLongLongAndOverflow(ptr, ptr) nonlazybind
declare double @PyFloat_AsDouble(ptr) nonlazybind
declare ptr @PyUnicode_AsUTF8AndSize(ptr, ptr) nonlazybind
declare void @PyErr_Clear() nonlazybind
declare ptr @PyTuple_New(i64) nonlazybind
declare i32 @PyTuple_SetItem(ptr, i64, ptr) nonlazybind
declare ptr @{WRAP}(ptr) nonlazybind
declare i8 @{DEFAULT_TYPE}() nonlazybind
@PyLong_Type = external global i8
@PyFloat_Type = external global i8
@PyBool_Type = external global i8
@PyUnicode_Type = external global i8
@PyList_Type = external global i8
@PyTuple_Type = external global i8
@_Py_NoneStruct = external global i8
@running = internal global i64 0  ; kernels; Python's lock is held where it is read and written

; Write a tensor's words; how many there are then, or -1 where the key is full or it is not plain.
define internal i64 @tensor_words(ptr %tensor, ptr %key, i64 %used) {
  %word = alloca i64
  %list_at = alloca ptr
  store i64 0, ptr %word
  call i32 @aoti_torch_get_device_type(ptr %tensor, ptr %word)
  %device = load i32, ptr %word
  %on_cpu = icmp eq i32 %device, 0
  br i1 %on_cpu, label %layout, label %bad
layout:
  call i32 @aoti_torch_get_layout(ptr %tensor, ptr %word)
  %its_layout = load i32, ptr %word
  %strided = icmp eq i32 %its_layout, 0
  br i1 %strided, label %rank, label %bad
rank:
  call i32 @aoti_torch_get_dim(ptr %tensor, ptr %word)
  %dims = load i64, ptr %word
  %both = mul i64 %dims, 2
  %with_head = add i64 %both, 3
  %after = add i64 %used, %with_head
  %fits = icmp sle i64 %after, 240
  br i1 %fits, label %write, label %bad
write:
  store i64 0, ptr %word
  call i32 @aoti_torch_get_dtype(ptr %tensor, ptr %word)
  %dtype = load i64, ptr %word
  %at = getelementptr i64, ptr %key, i64 %used
  store i64 1, ptr %at
  %second = getelementptr i64, ptr %at, i64 1
  store i64 %dtype, ptr %second
  %third = getelementptr i64, ptr %at, i64 2
  store i64 %dims, ptr %third
  %bytes = mul i64 %dims, 8
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %sizes = load ptr, ptr %list_at
  %sizes_at = getelementptr i64, ptr %at, i64 3
  call ptr @memcpy(ptr %sizes_at, ptr %sizes, i64 %bytes)
  call i32 @aoti_torch_get_strides(ptr %tensor, ptr %list_at)
  %strides = load ptr, ptr %list_at
  %strides_at = getelementptr i64, ptr %sizes_at, i64 %dims
  call ptr @memcpy(ptr %strides_at, ptr %strides, i64 %bytes)
  ret i64 %after
bad:
  ret i64 -1
}

; Write a text's words: its length, and its bytes; -1 where the key is full or it has none.
define internal i64 @text_words(ptr %object, ptr %key, i64 %used) {
  %size = alloca i64
  %bytes = call ptr @PyUnicode_AsUTF8AndSize(ptr %object, ptr %size)
  %there = icmp ne ptr %bytes, null
  br i1 %there, label %measure, label %none
measure:
  %length = load i64, ptr %size
  %more = add i64 %length, 23
  %words = lshr i64 %more, 3
  %after = add i64 %used, %words
  %fits = icmp sle i64 %after, 240
  br i1 %fits, label %write, label %bad
write:
  %last = sub i64 %after, 1
  %last_at = getelementptr i64, ptr %key, i64 %last
  store i64 0, ptr %last_at
  %at = getelementptr i64, ptr %key, i64 %used
  store i64 5, ptr %at
  %length_at = getelementptr i64, ptr %at, i64 1
  store i64 %length, ptr %length_at
  %bytes_at = getelementptr i64, ptr %at, i64 2
  call ptr @memcpy(ptr %bytes_at, ptr %bytes, i64 %length)
  ret i64 %after
none:
  call void @PyErr_Clear()
  br label %bad
bad:
  ret i64 -1
}

; Write the two words of a number or None, or a text's; -1 where it is none of them, or too large.
define internal i64 @other_words(ptr %object, ptr %type, ptr %key, i64 %used) {
  %over = alloca i32
  %after = add i64 %used, 2
  %fits = icmp sle i64 %after, 240
  br i1 %fits, label %look, label %bad
look:
  %at = getelementptr i64, ptr %key, i64 %used
  %value_at = getelementptr i64, ptr %at, i64 1
  %is_none = icmp eq ptr %object, @_Py_NoneStruct
  %is_bool = icmp eq ptr %type, @PyBool_Type
  %type_number = ptrtoint ptr %type to i64
  %is_type = icmp eq i64 %type_number, {DTYPE_TYPE}
  %is_single = or i1 %is_none, %is_type  ; there is one object of each
  %is_itself = or i1 %is_single, %is_bool
  br i1 %is_itself, label %itself, label %number
itself:
  %address = ptrtoint ptr %object to i64
  store i64 2, ptr %at
  store i64 %address, ptr %value_at
  ret i64 %after
number:
  %is_int = icmp eq ptr %type, @PyLong_Type
  br i1 %is_int, label %integer, label %maybe_float
integer:
  %value = call i64 @PyLong_AsLongLongAndOverflow(ptr %object, ptr %over)
  %overflow = load i32, ptr %over
  %whole = icmp eq i32 %overflow, 0
  store i64 3, ptr %at
  store i64 %value, ptr %value_at
  br i1 %whole, label %done, label %bad
maybe_float:
  %is_float = icmp eq ptr %type, @PyFloat_Type
  br i1 %is_float, label %float, label %maybe_text
maybe_text:
  %is_text = icmp eq ptr %type, @PyUnicode_Type
  br i1 %is_text, label %text, label %bad
text:
  %after_text = call i64 @text_words(ptr %object, ptr %key, i64 %used)
  ret i64 %after_text
float:
  %real = call double @PyFloat_AsDouble(ptr %object)
  store i64 4, ptr %at
  store double %real, ptr %value_at
  br label %done
done:
  ret i64 %after
bad:
  ret i64 -1
}

define internal i64 @hash_of(ptr %key, i64 %words) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %hash = phi i64 [ %words, %entry ], [ %mixed, %body ]
  %more = icmp slt i64 %i, %words
  br i1 %more, label %body, label %done
body:
  %at = getelementptr i64, ptr %key, i64 %i
  %word = load i64, ptr %at
  %both = xor i64 %hash, %word
  %product = mul i64 %both, -7046029254386353131
  %high = lshr i64 %product, 32
  %mixed = xor i64 %product, %high
  %next = add i64 %i, 1
  br label %head
done:
  ret i64 %hash
}

; The slot of a key, or an empty one: there always is one.
define internal ptr @slot_of(ptr %table, ptr %key, i64 %words, i64 %hash) {
entry:
  %count = load i64, ptr %table
  %slots_at = getelementptr %table, ptr %table, i64 0, i32 1
  %slots = load ptr, ptr %slots_at
  %mask = sub i64 %count, 1
  %first = and i64 %hash, %mask
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %other ]
  %slot = getelementptr %slot, ptr %slots, i64 %i
  %its_words_at = getelementptr %slot, ptr %slot, i64 0, i32 1
  %its_words = load i64, ptr %its_words_at
  %empty = icmp eq i64 %its_words, 0
  br i1 %empty, label %done, label %compare
compare:
  %its_hash = load i64, ptr %slot
  %same_hash = icmp eq i64 %its_hash, %hash
  %same_count = icmp eq i64 %its_words, %words
  %maybe = and i1 %same_hash, %same_count
  br i1 %maybe, label %closer, label %other
closer:
  %its_key_at = getelementptr %slot, ptr %slot, i64 0, i32 2
  %its_key = load ptr, ptr %its_key_at
  %bytes = mul i64 %words, 8
  %differs = call i32 @memcmp(ptr %its_key, ptr %key, i64 %bytes)
  %same = icmp eq i32 %differs, 0
  br i1 %same, label %done, label %other
other:
  %following = add i64 %i, 1
  %next = and i64 %following, %mask
  br label %head
done:
  ret ptr %slot
}

; Write a list's length, and the words of its items: a tuple has them in itself, a list elsewhere.
define internal i64 @list_words(ptr %object, ptr %type, ptr %key, i64 %used, ptr %handles, ptr %handle_count) {
  %after = add i64 %used, 2
  %fits = icmp sle i64 %after, 240
  br i1 %fits, label %write, label %bad
write:
  %length_from = getelementptr i8, ptr %object, i64 16
  %length = load i64, ptr %length_from
  %at = getelementptr i64, ptr %key, i64 %used
  store i64 6, ptr %at
  %length_at = getelementptr i64, ptr %at, i64 1
  store i64 %length, ptr %length_at
  %items = getelementptr i8, ptr %object, i64 24
  %is_tuple = icmp eq ptr %type, @PyTuple_Type
  br i1 %is_tuple, label %of_tuple, label %of_list
of_tuple:
  %in_tuple = call i64 @key_of(ptr %items, i64 %length, ptr %key, i64 %after, ptr %handles, ptr %handle_count)
  ret i64 %in_tuple
of_list:
  %elsewhere = load ptr, ptr %items
  %in_list = call i64 @key_of(ptr %elsewhere, i64 %length, ptr %key, i64 %after, ptr %handles, ptr %handle_count)
  ret i64 %in_list
bad:
  ret i64 -1
}

; The words of arguments, and handles on the tensors among them; how many words then, or -1.
define internal i64 @key_of(ptr %arguments, i64 %count, ptr %key, i64 %start, ptr %handles, ptr %handle_count) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %written ]
  %used = phi i64 [ %start, %entry ], [ %after, %written ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %object_at = getelementptr ptr, ptr %arguments, i64 %i
  %object = load ptr, ptr %object_at
  %type_at = getelementptr i8, ptr %object, i64 8
  %type = load ptr, ptr %type_at
  %address = ptrtoint ptr %type to i64
  %plain = icmp eq i64 %address, {TENSOR_TYPE}
  %parameter = icmp eq i64 %address, {PARAMETER_TYPE}
  %is_tensor = or i1 %plain, %parameter
  br i1 %is_tensor, label %tensor, label %no_tensor
tensor:
  %handle = getelementptr i8, ptr %object, i64 {TENSOR}
  %number = load i64, ptr %handle_count
  %room = icmp slt i64 %number, 32
  br i1 %room, label %keep, label %bad
keep:
  %place = getelementptr ptr, ptr %handles, i64 %number
  store ptr %handle, ptr %place
  %following = add i64 %number, 1
  store i64 %following, ptr %handle_count
  %first = call i64 @tensor_words(ptr %handle, ptr %key, i64 %used)
  br label %written
no_tensor:
  %is_list = icmp eq ptr %type, @PyList_Type
  %is_tuple = icmp eq ptr %type, @PyTuple_Type
  %is_row = or i1 %is_list, %is_tuple
  br i1 %is_row, label %row, label %other
row:
  %second = call i64 @list_words(ptr %object, ptr %type, ptr %key, i64 %used, ptr %handles, ptr %handle_count)
  br label %written
other:
  %third = call i64 @other_words(ptr %object, ptr %type, ptr %key, i64 %used)
  br label %written
written:
  %after = phi i64 [ %first, %keep ], [ %second, %row ], [ %third, %other ]
  %next = add i64 %i, 1
  %good = icmp sge i64 %after, 0
  br i1 %good, label %head, label %bad
done:
  ret i64 %used
bad:
  ret i64 -1
}

; The words of a call: positional arguments, and those with names, among which no tensor may be.
define internal i64 @call_key(ptr %arguments, i64 %count, ptr %names, ptr %key, ptr %handles, ptr %handle_count) {
  store i64 0, ptr %handle_count
  %default_type = call i8 @{DEFAULT_TYPE}()
  %its_number = zext i8 %default_type to i64
  store i64 %its_number, ptr %key
  %words = call i64 @key_of(ptr %arguments, i64 %count, ptr %key, i64 1, ptr %handles, ptr %handle_count)
  %has_names = icmp ne ptr %names, null
  %good = icmp sge i64 %words, 0
  %goes_on = and i1 %has_names, %good
  br i1 %goes_on, label %named, label %done
named:
  %tensors = load i64, ptr %handle_count
  %size_at = getelementptr i8, ptr %names, i64 16
  %size = load i64, ptr %size_at
  %texts = getelementptr i8, ptr %names, i64 24
  %with_names = call i64 @key_of(ptr %texts, i64 %size, ptr %key, i64 %words, ptr %handles, ptr %handle_count)
  %fit = icmp sge i64 %with_names, 0
  br i1 %fit, label %values, label %bad
values:
  %behind = getelementptr ptr, ptr %arguments, i64 %count
  %all = call i64 @key_of(ptr %behind, i64 %size, ptr %key, i64 %with_names, ptr %handles, ptr %handle_count)
  %tensors_now = load i64, ptr %handle_count
  %numbers = icmp eq i64 %tensors, %tensors_now
  %found = select i1 %numbers, i64 %all, i64 -1
  ret i64 %found
done:
  ret i64 %words
bad:
  ret i64 -1
}

; For Python, when it fills the table: the words of a call, its named arguments behind the others.
define i64 @stator_key(ptr %arguments, i64 %count, ptr %names, ptr %key, ptr %hash) {
  %handles = alloca [32 x ptr]
  %handle_count = alloca i64
  %words = call i64 @call_key(ptr %arguments, i64 %count, ptr %names, ptr %key, ptr %handles, ptr %handle_count)
  %number = call i64 @hash_of(ptr %key, i64 %words)
  store i64 %number, ptr %hash
  ret i64 %words
}

; The builtin.  Its first argument is the set of dispatch keys, which is no part of the key.
define ptr @stator_operator(ptr %self, ptr %arguments, i64 %count, ptr %names) {
entry:
  %key = alloca [240 x i64]
  %handles = alloca [32 x ptr]
  %handle_count = alloca i64
  %outputs = alloca [{OUTPUTS} x ptr]
  %bytes_at = getelementptr i8, ptr %self, i64 {TABLE_IN_SELF}
  %bytes = load ptr, ptr %bytes_at
  %operator = getelementptr i8, ptr %bytes, i64 {TABLE_IN_BYTES}
  %rest = getelementptr ptr, ptr %arguments, i64 1
  %less = sub i64 %count, 1
  %words = call i64 @call_key(ptr %rest, i64 %less, ptr %names, ptr %key, ptr %handles, ptr %handle_count)
  ; What a kernel calls is torch's: two that call each other would never end.
  %others = load i64, ptr @running
  %alone = icmp eq i64 %others, 0
  %has_key = icmp sgt i64 %words, 0
  %good = and i1 %alone, %has_key
  br i1 %good, label %find, label %miss
find:
  %hash = call i64 @hash_of(ptr %key, i64 %words)
  %table = load ptr, ptr %operator
  %slot = call ptr @slot_of(ptr %table, ptr %key, i64 %words, i64 %hash)
  %function_at = getelementptr %slot, ptr %slot, i64 0, i32 3
  %function = load ptr, ptr %function_at
  %known = icmp ne ptr %function, null
  br i1 %known, label %run, label %miss
run:
  %container_at = getelementptr %slot, ptr %slot, i64 0, i32 4
  %container = load ptr, ptr %container_at
  %output_count_at = getelementptr %slot, ptr %slot, i64 0, i32 5
  %output_count = load i64, ptr %output_count_at
  %given = load i64, ptr %handle_count
  store i64 1, ptr @running
  %code = call i32 %function(ptr %container, ptr %handles, i64 %given, ptr %outputs, i64 %output_count)
  store i64 0, ptr @running
  %done = icmp eq i32 %code, 0
  br i1 %done, label %wrap, label %miss
wrap:
  %single = icmp eq i64 %output_count, 1
  br i1 %single, label %one, label %several
one:
  %handle = load ptr, ptr %outputs
  %object = call ptr @{WRAP}(ptr %handle)
  call i32 @aoti_torch_delete_tensor_object(ptr %handle)
  ret ptr %object
several:
  %row = call ptr @PyTuple_New(i64 %output_count)
  br label %head
head:
  %i = phi i64 [ 0, %several ], [ %next, %body ]
  %more = icmp slt i64 %i, %output_count
  br i1 %more, label %body, label %all
body:
  %handle_at = getelementptr ptr, ptr %outputs, i64 %i
  %its_handle = load ptr, ptr %handle_at
  %its_object = call ptr @{WRAP}(ptr %its_handle)
  call i32 @aoti_torch_delete_tensor_object(ptr %its_handle)
  call i32 @PyTuple_SetItem(ptr %row, i64 %i, ptr %its_object)
  %next = add i64 %i, 1
  br label %head
all:
  ret ptr %row
miss:
  %miss_at = getelementptr ptr, ptr %operator, i64 1
  %missing = load ptr, ptr %miss_at
  %result = call ptr @PyObject_Vectorcall(ptr %missing, ptr %arguments, i64 %count, ptr %names)
  ret ptr %result
}
